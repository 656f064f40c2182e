"""The description of a fleet: what each node of a cluster needs to start a replica or the server.

A ``FleetConfig`` is the ``args`` of the application in a Serve config, and holds no secrets: API keys come from a
file or the environment of the server's node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from optkit.artifact.manifest import content_digest
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.fleet.autoscale import AutoscaleConfig
from optkit.recipe.engine_options import checked, engine_options
from optkit.runtime.kv.events import for_rank
from optkit.runtime.process.launch import DEFAULT_FACTORY
from optkit.runtime.ranks.size import sharing
from optkit.serve.server import ServeOptions


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the server, with the meaning of the fields of the same names in ``ServeOptions``.

    Attributes:
        api_key_file: on the nodes; None reads the environment variable OPTKIT_API_KEY there.
        chat_template: a file on the nodes.
        response_cache_bytes: of each server.
    """

    host: str = "127.0.0.1"
    served_model_names: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_queue: int = 256
    request_timeout: float = 600.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    generation_config: str = "auto"
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    response_cache_bytes: int = 0
    otlp_traces_endpoint: str | None = None

    def options(self) -> ServeOptions:
        """The options of a server on the local machine, with the keys.

        Raises:
            UserError: no key file, or an address for other machines without a key.
        """
        from optkit.serve.http.address import read_api_keys

        values = {name: getattr(self, name) for name in self.__struct_fields__}
        file, template = values.pop("api_key_file"), values.pop("chat_template")
        return ServeOptions(
            **values,
            api_keys=read_api_keys(Path(file) if file else None),
            chat_template=Path(template) if template else None,
        )


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet of replicas of an artifact.

    Attributes:
        name: of the fleet; names its applications, its actors and its secret.
        artifact: directory on each node.
        digest: of the artifact; a node with another artifact refuses to serve. Empty accepts any.
        engine: the given options of the engine, by name.
        replicas: number of replicas.
        servers: number of processes with the HTTP server.
        cpus, gpus: reserved for each replica, on a single node.
        prefill: replicas that prefer to compute the prompts of the others.
        drain_seconds: time for running answers when a replica leaves.
        autoscale: limits and promise of a fleet of changing size, with ``replicas`` at first; None: fixed.
        http: options of the server.
        factory: of the engines (``optkit.runtime.process.launch``); another factory reads ``artifact`` in another way.
    """

    artifact: str
    name: str = "optkit"
    digest: str = ""
    engine: dict[str, Any] = {}
    replicas: int = 1
    servers: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    prefill: int = 0
    drain_seconds: float = 600.0
    autoscale: AutoscaleConfig | None = None
    http: HttpConfig = HttpConfig()
    factory: str = DEFAULT_FACTORY

    @property
    def most_replicas(self) -> int:
        """The most replicas of the fleet."""
        return self.replicas if self.autoscale is None else self.autoscale.max_replicas

    @property
    def of_replicas(self) -> FleetConfig:
        """The part that a replica depends on: a change of anything else starts no replica anew."""
        plain = FleetConfig(artifact="")
        return msgspec.structs.replace(
            self, replicas=plain.replicas, servers=plain.servers, autoscale=None, http=plain.http
        )

    @property
    def of_servers(self) -> FleetConfig:
        """The part that an HTTP server depends on."""
        plain = FleetConfig(artifact="")
        return msgspec.structs.replace(
            self,
            engine=plain.engine,
            replicas=self.most_replicas,
            servers=plain.servers,
            cpus=plain.cpus,
            gpus=plain.gpus,
            autoscale=None,
        )

    def for_rank(self, local_rank: int) -> FleetConfig:
        """The config for the replica number ``local_rank`` of a machine, whose ports are its own."""
        events = self.engine.get("kv_events_config")
        if not events:
            return self
        return msgspec.structs.replace(
            self, engine={**self.engine, "kv_events_config": for_rank(events, local_rank)}
        )

    def scale(self) -> dict[str, Any]:
        """The number of replicas as options of a deployment of Ray Serve: fixed, or by the autoscaling policy alone."""
        if self.autoscale is None:
            return {"num_replicas": self.replicas}
        policy = {
            "policy_function": f"{__package__}.serve_policy:PredictedTtftPolicy",
            "policy_kwargs": msgspec.to_builtins(self.autoscale),
        }
        scaling = {
            "min_replicas": self.autoscale.min_replicas,
            "initial_replicas": self.replicas,
            "max_replicas": self.autoscale.max_replicas,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 2.0,
            "upscale_delay_s": 0.0,  # the policy has delays of its own
            "downscale_delay_s": 0.0,
            "policy": policy,
        }
        return {"autoscaling_config": scaling}

    def to_args(self) -> dict[str, Any]:
        """The config as JSON values, without what is default."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        defaults: dict[str, Any] = msgspec.to_builtins(FleetConfig(artifact=""))
        http = {key: value for key, value in found["http"].items() if value != defaults["http"][key]}
        kept = {key: value for key, value in found.items() if value != defaults[key]}
        return kept | ({"http": http} if http else {})

    def open(self) -> Artifact:
        """The artifact of the local node, verified.

        Raises:
            UserError: no artifact, a damaged artifact, or another digest.
        """
        opened = Artifact.open(self.artifact)
        if self.digest and content_digest(opened.manifest) != self.digest:
            raise UserError(
                f"the artifact here is not the deployed one, whose digest begins with {self.digest[:12]}",
                where=self.artifact,
                fix="copy the same artifact to every node",
            )
        return opened


def read_config(args: Mapping[str, Any]) -> FleetConfig:
    """The config in the ``args`` of a Serve application.

    Raises:
        UserError: an unknown key, a wrong type, or a wrong option of the engine.
    """
    try:
        config = msgspec.convert(dict(args), FleetConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(str(error), where="args of the application") from error
    checked(config.engine)
    return config


def threads_and_cpus(artifact: Artifact, engine: Mapping[str, Any], cores: int) -> tuple[int, int]:
    """The compute threads of a process of a replica, and the cores for all processes of a replica at once.

    Ranks that share layers compute at once, stages in turn.

    Args:
        cores: for a replica, where neither ``engine`` nor the recipe has a number of threads.

    Raises:
        UserError: the model can't be shared by so many ranks.
    """
    options = engine_options(artifact.recipe, engine)
    shared = sharing(artifact, options)
    at_once = 1 if shared.by_layers else shared.size
    threads = options.threads or max(1, cores // at_once)
    return threads, threads * at_once
