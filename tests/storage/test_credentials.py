"""Credentials from the sources that AWS's SDKs support, proxies and private CAs, with a store that
verifies signatures."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lathe_base.errors import Code
from lathe_base.storage import fetch, read_text, write_text
from lathe_base.storage.credentials import provider
from tests.storage.conftest import Proxy
from tests.support.errors import raises
from tests.support.loopback import LoopbackServer, QuietHandler
from tests.support.s3 import ACCESS_KEY, SECRET_KEY
from tests.support.tls import certificate

TOKEN = "the-pods-token"
UNTIL = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
OF_STS = f"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{ACCESS_KEY}</AccessKeyId>
<SecretAccessKey>{SECRET_KEY}</SecretAccessKey><SessionToken>a-token</SessionToken>
<Expiration>{UNTIL}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
OF_A_CONTAINER = json.dumps(
    {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": "t", "Expiration": UNTIL}
)


class Issuer(QuietHandler):
    """Returns the store's keys for the right token: to POST like STS, and to GET like ECS."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode() + self.path
        self._answer_if(f"WebIdentityToken={TOKEN}" in asked, OF_STS)

    def do_GET(self) -> None:
        self._answer_if(self.headers["Authorization"] == TOKEN, OF_A_CONTAINER)

    def _answer_if(self, is_right: bool, body: str) -> None:
        self.reply(body.encode(), 200 if is_right else 403)


@pytest.fixture
def file(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an object; the keys are removed from the environment after writing it."""
    write_text(f"{s3}/a.txt", "A")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return f"{s3}/a.txt"


@pytest.mark.parametrize("kind", ["web identity", "container"])
def test_keys_that_a_service_gives_out(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN, encoding="utf-8")
    with LoopbackServer(Issuer) as issuer:
        if kind == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/keys")
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        else:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
            monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/lathe")
        assert read_text(file) == "A"
    assert read_text(file) == "A"  # credentials are cached while valid, even if the service is down


def test_a_secret_that_is_not_mounted_gives_way_to_an_identity(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secret is optional in the server's pods."""
    folder = tmp_path / "secret"
    folder.mkdir()
    monkeypatch.setenv("LATHE_S3_SECRET_DIR", str(folder))
    with raises(Code.UNAUTHORIZED, "accesskey and secretkey"):
        read_text(file)
    (tmp_path / "token").write_text(TOKEN)
    with LoopbackServer(Issuer) as issuer:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/lathe")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
        assert read_text(file) == "A"
    (folder / "accesskey").write_text("wrong")
    (folder / "secretkey").write_text("wrong")
    with raises(Code.UNAUTHORIZED, "LATHE_S3_SECRET_DIR"):
        read_text(file)


def test_a_token_that_is_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("another", encoding="utf-8")
    with LoopbackServer(Issuer) as issuer:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        with raises(Code.UNAUTHORIZED, "AWS_WEB_IDENTITY_TOKEN_FILE=", "403") as raised:
            read_text(file)
    assert "AWS_ROLE_ARN" in raised.value.hint and "another" not in str(raised.value)


def test_a_profile(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[default]\n{keys}[work]\n{keys}", encoding="utf-8")
    assert read_text(file) == "A"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert read_text(file) == "A"
    monkeypatch.setenv("AWS_PROFILE", "other")
    with raises(Code.UNAUTHORIZED, "AWS_PROFILE=other"):
        read_text(file)
    monkeypatch.delenv("AWS_PROFILE")
    percent = keys.replace(SECRET_KEY, "a%b")  # AWS's SDKs take it as it is
    (tmp_path / "credentials").write_text(f"[default]\n{percent}", encoding="utf-8")
    found = provider(is_amazon=False)
    assert found and found.retrieve().secret_key == "a%b"
    only = f"[default]\naws_access_key_id = {ACCESS_KEY}\n"
    (tmp_path / "credentials").write_text(only, encoding="utf-8")
    with raises(Code.UNAUTHORIZED, tmp_path / "credentials", "aws_secret_access_key"):
        read_text(file)
    (tmp_path / "credentials").write_text("aws_access_key_id", encoding="utf-8")
    with raises(Code.MALFORMED, tmp_path / "credentials"):
        read_text(file)


def test_keys_of_the_environment_do_not_ask_for_a_profile(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to explain an error: the profile may be one that only AWS's SDKs support."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("AWS_PROFILE", "of-single-sign-on")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with raises(Code.UNAUTHORIZED, "a.txt") as raised:
        read_text(f"{s3}/a.txt")
    assert "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in raised.value.hint


def test_one_key_without_the_other(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    with raises(Code.MISSING_OPTION, "AWS_SECRET_ACCESS_KEY"):
        read_text(file)


def test_through_a_proxy(s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the proxy can resolve the name of the store."""
    monkeypatch.setenv("http_proxy", proxy.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.invalid:9000")
    write_text(f"{s3}/a.txt", "A")
    assert read_text(f"{s3}/a.txt") == "A" and proxy.up and proxy.down
    monkeypatch.setenv("no_proxy", "other,.invalid")
    with raises(Code.TIMEOUT, "http://store.invalid:9000"):
        read_text(f"{s3}/a.txt")


class Page(QuietHandler):
    def do_GET(self) -> None:
        self.reply(b"A")


AUTHORITIES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.mark.parametrize("variable", AUTHORITIES)
def test_a_private_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in AUTHORITIES:
        monkeypatch.delenv(name, raising=False)
    pem, authority = certificate(tmp_path)
    with LoopbackServer(Page, pem) as server:
        with raises(Code.UNREACHABLE, "CERTIFICATE_VERIFY_FAILED"):
            fetch(f"{server.url}/f", tmp_path / "refused")
        monkeypatch.setenv(variable, str(authority))
        assert fetch(f"{server.url}/f", tmp_path / "fetched").read_text(encoding="utf-8") == "A"
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent"))
        with raises(Code.NOT_FOUND, "AWS_CA_BUNDLE=", tmp_path / "absent"):
            fetch(f"{server.url}/f", tmp_path / "absent")
