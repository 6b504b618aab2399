from tests.support.attested import made, made_once  # noqa: F401
