"""A real S3 server on this machine, with one bucket, that can go away and come back with all that is in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "tinsmith"
SECRET = "a-secret-that-nobody-may-see"


class Bucket:
    """Reached by what is in the environment, as a user would set it."""

    def __init__(self) -> None:
        self._port = 0
        self.come_back()

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "tinsmith-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def come_back(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it prints a line for every request
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
        self._port = self._server.get_host_and_port()[1]

    def go_away(self) -> None:
        self._server.stop()

    def objects(self, prefix: str) -> list[str]:
        """The keys of all objects under a prefix, as somebody else sees them."""
        found = self._client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", [])]

    def make(self) -> None:
        self._client().create_bucket(Bucket=BUCKET)

    def remove(self) -> None:
        client = self._client()
        for key in self.objects(""):
            client.delete_object(Bucket=BUCKET, Key=key)
        client.delete_bucket(Bucket=BUCKET)

    def damage(self, key: str) -> None:
        client = self._client()
        content = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        client.put_object(Bucket=BUCKET, Key=key, Body=content[:-1] + bytes([content[-1] ^ 1]))

    def _client(self):  # type: ignore[no-untyped-def] # boto3 has no types
        import boto3

        return boto3.client("s3")


@contextmanager
def running_bucket() -> Iterator[Bucket]:
    bucket = Bucket()
    # Whoever has read the environment before asks another server.
    with mock.patch.dict(os.environ, bucket.environment), mock.patch.object(S3FileSystem, "_cache", {}):
        bucket.make()
        try:
            yield bucket
        finally:
            bucket.go_away()
