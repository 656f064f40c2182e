"""The engine of a replica that exchanges KV with the other replicas: an engine with a transfer server.

The secret and the address come by environment variables, because a command line can be read by all users of a
machine::

    OPTKIT_FLEET_SECRET    64 hexadecimal digits, the same for all replicas; without it no KV is exchanged
    OPTKIT_PEER_ADDRESS    host:port at which other replicas reach this one; 127.0.0.1 and any port by default
"""

from __future__ import annotations

import logging
import os

from optkit.artifact.manifest import content_digest, read_manifest
from optkit.errors import UserError
from optkit.fleet.peers import EnginePeers
from optkit.fleet.transfer import parse_address
from optkit.fleet.kv_wire import TransferError
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime import factory
from optkit.runtime.engine import Engine

logger = logging.getLogger(__name__)

SECRET, ADDRESS = "OPTKIT_FLEET_SECRET", "OPTKIT_PEER_ADDRESS"
SECRET_BYTES = 32
FACTORY = f"{__name__}:load_engine"  # of ``optkit.runtime.process.client.EngineClient``


def load_engine(artifact_dir: str, options: EngineOptions) -> Engine:
    """The engine of an artifact, with transfers of KV where ``OPTKIT_FLEET_SECRET`` is set.

    Raises:
        UserError: as ``optkit.runtime.factory.load_engine``, or a variable is wrong.
    """
    secret = deployment_secret()
    engine = factory.load_engine(artifact_dir, options)
    if secret is not None:
        from pathlib import Path

        connect(engine, secret, content_digest(read_manifest(Path(artifact_dir))))
    return engine


def connect(engine: Engine, secret: bytes, version: str) -> None:
    """Let ``engine`` exchange KV; a line in the log where it can't."""
    host, port = peer_address()
    try:
        peers = EnginePeers(engine, secret, version, host, port)
    except ValueError as refusal:
        logger.warning("no KV is exchanged with other replicas: %s", refusal)
        return
    except OSError as error:
        raise UserError(
            f"the address {host}:{port} can't be had: {error}", where=ADDRESS, fix="name a free port, or port 0"
        ) from error
    cache = engine.scheduler.kv.cache
    if cache is not None:
        cache.rekey(secret)
    engine.peers = peers


def deployment_secret() -> bytes | None:
    """The secret of the deployment, or None.

    Raises:
        UserError: the variable is no secret.
    """
    text = os.environ.get(SECRET, "")
    if not text:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        fix = 'python -c "import secrets; print(secrets.token_hex(32))" makes one'
        raise UserError(f"a secret has {2 * SECRET_BYTES} hexadecimal digits", where=SECRET, fix=fix)
    return secret


def peer_address() -> tuple[str, int]:
    """Host and port of the transfer server.

    Raises:
        UserError: the variable is no address.
    """
    try:
        return parse_address(os.environ.get(ADDRESS) or "127.0.0.1:0")
    except TransferError as error:
        raise UserError(str(error), where=ADDRESS, fix="write host:port") from error
