"""The keys for signing requests to a store, from the same sources as in AWS's SDKs."""

import configparser
import os
import re
from functools import cache
from pathlib import Path

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider, StaticProvider

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import shown
from lathe_base.storage.network import pool

SECRET_DIR = "LATHE_S3_SECRET_DIR"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
NAMES = (*KEYS, "AWS_SESSION_TOKEN")
IDENTITY, ROLE, STS = "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN", "AWS_ENDPOINT_URL_STS"
PROFILE, FILE = "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"
CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
TOKEN = "AWS_CONTAINER_AUTHORIZATION_TOKEN"
NO_METADATA = "AWS_EC2_METADATA_DISABLED"
METADATA_SECONDS = 1.0  # the address of the metadata is silent on machines outside EC2
TEMPORARY = (IDENTITY, ROLE, STS, *CONTAINER)


def provider(is_amazon: bool) -> Provider | None:
    """The credentials provider; None for anonymous requests.

    In this order: the mounted secret, the environment, a web identity (IRSA or compatible), a
    profile of the shared credentials file, the metadata of a container, and, for Amazon's own
    store, that of an EC2 instance.

    Raises:
        UserError: one key without the other, or a profile that does not exist.
    """
    source = _source()
    inner: Provider | None
    if source == SECRET_DIR:
        inner = MountedSecret(Path(os.environ[SECRET_DIR]))
    elif source in KEYS:
        access, secret, token = ((os.environ.get(name) or "").strip() for name in NAMES)
        if not access or not secret:
            name = KEYS[1] if access else KEYS[0]
            raise UserError(
                f"{name} is not set, but the other key is",
                "set both, or neither",
                Code.MISSING_OPTION,
            )
        inner = StaticProvider(access, secret, token or None)
    elif source == PROFILE:
        inner = SharedProfile()
    elif source:
        inner = _temporary(source, tuple(os.environ.get(name) for name in TEMPORARY))
    else:
        may_ask = os.environ.get(NO_METADATA, "").lower() != "true"
        inner = _instance_provider() if is_amazon and may_ask else None
    return Printable(source, inner) if inner else None


def explain_credentials() -> str:
    """A hint for when a store rejects the keys."""
    source = _source()
    if source == SECRET_DIR:
        keys = f"the files accesskey and secretkey in {os.environ[SECRET_DIR]} ({SECRET_DIR})"
    elif source == IDENTITY:
        keys = f"{ROLE} and the service account whose token {IDENTITY} names"
    elif source == PROFILE:
        keys = f"the profile {_profile()} in {_file()}"
    else:
        keys = " and ".join(KEYS)
    return f"check {keys}, and the policies of the keys and of the bucket"


def _source() -> str:
    """The variable that says where the keys come from, AWS_PROFILE for the default profile too;
    empty where none does. The file of profiles is read only if it is the one that counts.

    A secret that is mounted if there is one gives way to an identity of the pod's own.
    """
    # What is set for this process comes first, then what the machine may offer to any process.
    source = next((name for name in (SECRET_DIR, *KEYS, IDENTITY) if os.environ.get(name)), "")
    if source == SECRET_DIR and not Path(os.environ[SECRET_DIR], "accesskey").exists():
        source = next((name for name in (IDENTITY, *CONTAINER) if os.environ.get(name)), source)
    if source:
        return source
    if _profile_keys().get("aws_access_key_id"):
        return PROFILE
    if os.environ.get(PROFILE):  # a profile that is named must not give way to another source
        raise UserError(
            f"{PROFILE}={_profile()}: {_file()} has no keys for that profile",
            f"add aws_access_key_id and aws_secret_access_key to it, or unset {PROFILE}",
            Code.UNAUTHORIZED,
        )
    return next(filter(os.environ.get, CONTAINER), "")


class MountedSecret(Provider):
    """The files `accesskey` and `secretkey` of a folder, and `sessiontoken` if there is one. They
    are read for every request, since a mounted secret changes while its pod runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def retrieve(self) -> Credentials:
        token = self._read("sessiontoken") if (self._folder / "sessiontoken").exists() else None
        return Credentials(self._read("accesskey"), self._read("secretkey"), token or None)

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise UserError(
                f"{SECRET_DIR}={self._folder}: accesskey and secretkey: {reason}",
                "mount the secret there, or unset the variable",
                Code.UNAUTHORIZED,
            ) from None


class SharedProfile(Provider):
    """The keys of a profile of the shared credentials file, read for every request."""

    def retrieve(self) -> Credentials:
        values = _profile_keys()
        access, secret = (values.get(name.lower()) for name in KEYS)
        if not access or not secret:
            raise UserError(
                f"{_file()}: the profile {_profile()} lacks {KEYS[bool(access)].lower()}",
                f"add it, or set {FILE} to another file",
                Code.UNAUTHORIZED,
            )
        return Credentials(access, secret, values.get(NAMES[2].lower()) or None)


class Printable(Provider):
    """Refuses keys that no header can carry: the HTTP client's error would contain the header."""

    def __init__(self, source: str, inner: Provider) -> None:
        self._source, self._inner = source, inner

    def retrieve(self) -> Credentials:
        keys = self._inner.retrieve()
        values = (keys.access_key, keys.secret_key, keys.session_token or "")
        for name, value in zip(NAMES, values, strict=True):
            if not re.fullmatch("[!-~]*", value):
                where = {SECRET_DIR: f"{SECRET_DIR}={os.environ.get(SECRET_DIR)}", PROFILE: _file()}
                raise UserError(
                    f"{where.get(self._source, name)}: the {name} contains a line break, a space "
                    "or another character that keys do not have",
                    "copy it again, as one line",
                    Code.UNAUTHORIZED,
                )
        return keys


class Temporary(Provider):
    """Keys that a service gives out for a while; `variable` says which service."""

    def __init__(self, variable: str, inner: Provider) -> None:
        self._variable, self._inner = variable, inner

    def retrieve(self) -> Credentials:
        try:
            return self._inner.retrieve()
        except (OSError, ValueError, KeyError) as error:
            value = shown(os.environ.get(self._variable, ""))
            # The query of a request to STS has the token, and http.client repeats a header's value.
            reason = re.sub(r"//[^/\s]*@", "//", re.sub(r"\?\S*", "", str(error)))
            if "header value" in reason:
                reason = f"the token in {TOKEN} or its file contains a line break"
            raise UserError(
                f"{self._variable}={value}: cannot get keys: {reason}",
                f"check {ROLE}, the file and the role's trust policy"
                if self._variable == IDENTITY
                else "check the service that this variable names",
                Code.UNAUTHORIZED,
            ) from None


@cache
def _temporary(variable: str, environment: tuple[str | None, ...]) -> Provider:
    """One provider for all requests with that environment: it keeps its keys until they expire."""
    sts = os.environ.get(STS) or None if variable == IDENTITY else None
    address = (sts or "https://sts.amazonaws.com") if variable == IDENTITY else ""
    inner = IamAwsProvider(custom_endpoint=sts, http_client=pool(2, address=address))
    return Temporary(variable, inner)


@cache
def _instance_provider() -> Provider | None:
    """Keys of this EC2 instance; None on other machines."""
    # Not the usual pool: other machines must not wait for its longer timeout.
    client = urllib3.PoolManager(timeout=METADATA_SECONDS, retries=False)
    made = IamAwsProvider(http_client=client)
    try:
        made.retrieve()
    except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError):
        return None
    return made


def _profile_keys() -> dict[str, str]:
    """The values of the profile that counts; empty without one."""
    parser = configparser.ConfigParser(interpolation=None)  # a % is part of the key
    try:
        parser.read(_file(), encoding="utf-8")
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise UserError(
            f"{_file()}: not a credentials file: {str(error).splitlines()[0]}",
            f"fix it, or set {FILE} to another file",
            Code.MALFORMED,
        ) from None
    return dict(parser[_profile()]) if parser.has_section(_profile()) else {}


def _profile() -> str:
    return os.environ.get(PROFILE) or "default"


def _file() -> Path:
    return Path(os.environ.get(FILE) or "~/.aws/credentials").expanduser()
