"""Who we are to a Valkey. Each is asked whenever a connection is made, so that a changed secret needs no restart.

They satisfy redis.CredentialProvider without importing it.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmers.errors import ConfigError

TOKEN_S = 900
"""For which ElastiCache takes a token, at most."""
REFRESH_S = 600.0
"""After which a token is made anew: one that is used has five minutes left."""

Credentials = tuple[str] | tuple[str, str]
"""(password,) of the default user, or (user, password)."""


@dataclass(frozen=True, slots=True)
class EnvironmentPassword:
    """A password in an environment variable."""

    username: str | None
    variable: str

    def get_credentials(self) -> Credentials:
        """Raises ConfigError where it is not set."""
        password = os.environ.get(self.variable)
        if password is None:
            raise ConfigError(
                "connecting to Valkey", seen=f"l2.password_env names {self.variable}, which is not set", do="Set it."
            )
        return (self.username, password) if self.username else (password,)


@dataclass(frozen=True, slots=True)
class PasswordFile:
    """A password in a file that somebody else rotates: a mounted secret, say."""

    username: str | None
    path: Path

    def get_credentials(self) -> Credentials:
        """Raises ConfigError where it cannot be read."""
        try:
            password = self.path.read_text().rstrip("\n")
        except OSError as error:
            raise ConfigError(
                "connecting to Valkey",
                seen=f"l2.password_file {self.path} cannot be read: {error.strerror}",
                do="Write the password there, or name another file.",
            ) from error
        return (self.username, password) if self.username else (password,)


@dataclass(slots=True)
class ElastiCacheToken:
    """An IAM user of ElastiCache: the password is a presigned URL that is good for 15 minutes.

    Source: docs.aws.amazon.com/AmazonElastiCache/latest/dg/auth-iam.html. The server cuts a connection after 12 hours;
    the next command makes another one, with a token of its own.
    """

    username: str
    cache_name: str
    region: str
    serverless: bool
    _token: str = field(default="", repr=False)
    _made_at: float = float("-inf")

    def get_credentials(self) -> Credentials:
        """Raises ConfigError where there are no AWS credentials."""
        now = time.monotonic()
        if now - self._made_at > REFRESH_S:
            self._token, self._made_at = presigned(self, _aws_credentials()), now
        return (self.username, self._token)


def presigned(user: ElastiCacheToken, credentials: Any) -> str:
    """The token: what botocore signs for `connect`, without its scheme. `credentials`: botocore's."""
    from urllib.parse import urlencode

    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    asked = {"Action": "connect", "User": user.username}
    if user.serverless:
        asked["ResourceType"] = "ServerlessCache"
    request = AWSRequest("GET", f"https://{user.cache_name}/?{urlencode(asked)}")
    SigV4QueryAuth(credentials, "elasticache", user.region, expires=TOKEN_S).add_auth(request)
    return str(request.url).removeprefix("https://")


def _aws_credentials() -> Any:
    """As boto3 finds them: environment, profile, web identity, instance."""
    import boto3

    found = boto3.Session().get_credentials()
    if found is None:
        raise ConfigError(
            "connecting to ElastiCache with IAM", seen="there are no AWS credentials", do="Give the process a role."
        )
    return found.get_frozen_credentials()
