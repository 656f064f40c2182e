"""``optkit deploy``: replicas of an artifact on a Ray cluster, or the files that describe them."""

from __future__ import annotations

import enum
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optkit.cli import console
from optkit.cli.engine_flags import size, with_engine_flags
from optkit.cli.serve import check_prefill
from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.recipe.engine_options import ACCESS

if TYPE_CHECKING:
    from optkit.fleet.cluster import Cluster
    from optkit.fleet.config import FleetConfig
    from optkit.fleet.update import Deployed

CLUSTER, UPDATES, KUBERNETES = "Cluster", "Updates", "Kubernetes"  # groups in --help
ROLLED_BACK = 5  # exit code, as of `optkit bench` where a claim is not held


class Strategy(enum.StrEnum):
    """Ways from one artifact to another."""

    rolling = "rolling"
    recreate = "recreate"


class Format(enum.StrEnum):
    """Descriptions of a deployment."""

    serve = "serve"
    kuberay = "kuberay"


@with_engine_flags
def deploy(
    artifact: Annotated[Path, typer.Argument(help="Artifact that optkit optimize wrote.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="URL of the cluster's Ray dashboard. Default: RAY_DASHBOARD_ADDRESS, or http://127.0.0.1:8265. The "
            "token of a cluster with token authentication comes from RAY_AUTH_TOKEN or ~/.ray/auth_token."
        ),
    ] = None,
    print_format: Annotated[
        Format | None,
        typer.Option(
            "--print",
            help="Print the deployment and apply nothing. serve: the config for Ray's 'serve deploy'; kuberay: a "
            "RayService manifest for Kubernetes.",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Number of replicas.")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Let the fleet grow up to so many replicas, and shrink to --replicas again: by the predicted time to "
            "first token and the backlog of tokens. Default: --replicas, always.",
        ),
    ] = None,
    ttft_target: Annotated[
        float,
        typer.Option(
            min=0.001,
            help="With --max-replicas: seconds to the first token (p95) beyond which the fleet grows.",
        ),
    ] = 2.0,
    prefill: Annotated[
        int,
        typer.Option(
            min=0,
            help="So many of the replicas prefer to compute prompts for the others, which then decode without pauses. "
            "A preference, not a wall: where a prompt is computed is decided by predicted time, for each request.",
        ),
    ] = 0,
    name: Annotated[str, typer.Option(help="Name of the application; each name is a fleet.")] = "optkit",
    strategy: Annotated[
        Strategy,
        typer.Option(
            rich_help_panel=UPDATES,
            help="Where a fleet of another artifact runs under the name. rolling: replace its replicas one by one, "
            "after a test and a comparison of the first new one with an old one under load; a failure brings the old "
            "artifact back (exit code 5). recreate: end all at once, then start; no checks.",
        ),
    ] = Strategy.rolling,
    max_surge: Annotated[
        int,
        typer.Option(
            min=0,
            max=1,
            rich_help_panel=UPDATES,
            help="Replicas beside --replicas during a rolling update. 0: the cluster has no room for another, so one "
            "fewer serves meanwhile.",
        ),
    ] = 1,
    canary_bound: Annotated[
        float,
        typer.Option(
            min=0.01,
            rich_help_panel=UPDATES,
            help="Most time to first token and time per token of the new artifact, as multiples of the old one's; to "
            "be shown at 95 % confidence.",
        ),
    ] = 1.1,
    path_on_nodes: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CLUSTER,
            metavar="DIR",
            help="Directory of the artifact on each node. Default: its path here. Each node checks files and digest.",
        ),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            rich_help_panel=CLUSTER,
            help="CPUs reserved for a replica on its node. Default: --threads, or 1.",
        ),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            rich_help_panel=CLUSTER,
            help="GPUs reserved for a replica. Default: 1 for an artifact made for a GPU.",
        ),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            rich_help_panel=CLUSTER,
            help="HTTP servers, which tokenize and route. One is enough for some thousand tokens a second; /metrics "
            "and the response cache are those of the server that answers.",
        ),
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            min=0, rich_help_panel=CLUSTER, help="Seconds to wait until all replicas run; 0: do not wait."
        ),
    ] = 600.0,
    host: Annotated[
        str,
        typer.Option(
            rich_help_panel=ACCESS,
            help="Address to listen on, at each node. Any address but loopback needs an API key on the nodes.",
        ),
    ] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, rich_help_panel=ACCESS, help="HTTP port.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=ACCESS, help="Name of the model in requests; repeat the option for aliases."
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=ACCESS,
            help="File with the keys of clients on the nodes, a key per line. Default: OPTKIT_API_KEY in the "
            "environment of the nodes' Ray. Keys are never part of a config.",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=ACCESS, help="Requests that may wait; further ones get 429."),
    ] = 256,
    request_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=ACCESS,
            help="Longest time from a request's arrival to its last token, in seconds; also the time that running "
            "answers have when a replica leaves. 0: no limit.",
        ),
    ] = 600.0,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=ACCESS, help="Origin of web pages that may read answers (CORS); repeat for more."
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option(rich_help_panel=ACCESS, help="Path of the application, such as /llm.")
    ] = "",
    response_cache: Annotated[
        str,
        typer.Option(
            rich_help_panel=ACCESS,
            metavar="SIZE",
            help="Memory of each server for whole answers, such as 256MiB.",
        ),
    ] = "0",
    image: Annotated[
        str,
        typer.Option(rich_help_panel=KUBERNETES, help="Image with optkit[fleet], for all pods."),
    ] = "optkit:latest",
    claim: Annotated[
        str,
        typer.Option(
            rich_help_panel=KUBERNETES,
            help="PersistentVolumeClaim with the artifact, mounted read-only at /artifacts; without it the image has "
            "the artifact at --path-on-nodes.",
        ),
    ] = "",
    secret: Annotated[
        str,
        typer.Option(
            rich_help_panel=KUBERNETES,
            help="Secret with the keys api-key (of clients) and ray-token (of Ray's processes).",
        ),
    ] = "optkit",
    pod_memory: Annotated[
        str, typer.Option(rich_help_panel=KUBERNETES, help="Memory of a pod with a replica.")
    ] = "4Gi",
    **engine_options: Any,
) -> None:
    """Serve replicas of an artifact on a Ray cluster, behind one HTTP address on every node.

    Other applications of the cluster stay as they are; a fleet of the same name is updated, to another artifact replica
    by replica. Whoever reaches Ray's ports can run code on the nodes: docs/fleet.md says how to close them.

    Example: optkit deploy artifact/ --address http://head:8265 --replicas 4

    Example: optkit deploy artifact-v2/ --replicas 4 --canary-bound 1.05

    Example: optkit deploy artifact/ --print kuberay --image registry.example/optkit:1 --claim models > fleet.yaml
    """
    need_extra("serve", "optkit deploy")
    import yaml

    from optkit.artifact.manifest import content_digest
    from optkit.artifact.open import Artifact
    from optkit.fleet.autoscale import AutoscaleConfig
    from optkit.fleet.config import FleetConfig, HttpConfig, threads_and_cpus
    from optkit.fleet.manifests import Pods, ray_service, replicas_name, serve_config

    opened = Artifact.open(artifact)
    if max_replicas is not None and max_replicas < replicas:
        raise UserError(f"it is below --replicas {replicas}", where=f"--max-replicas {max_replicas}")
    check_prefill(prefill, replicas)
    threads, cores = threads_and_cpus(opened, engine_options, 1)
    config = FleetConfig(
        name=name,
        artifact=path_on_nodes or str(artifact.resolve()),
        digest=content_digest(opened.manifest),
        engine={**engine_options, "threads": threads},
        replicas=replicas,
        servers=servers,
        cpus=cpus or float(cores),
        prefill=prefill,
        gpus=(0.0 if opened.recipe.target == "cpu" else 1.0) if gpus is None else gpus,
        drain_seconds=request_timeout or 3600.0,
        autoscale=None
        if max_replicas is None
        else AutoscaleConfig(ttft_seconds=ttft_target, min_replicas=replicas, max_replicas=max_replicas),
        http=HttpConfig(
            host=host,
            served_model_names=tuple(served_model_name or ()),
            api_key_file=api_key_file,
            max_queue=max_queue,
            request_timeout=request_timeout,
            allowed_origins=tuple(allowed_origins or ()),
            root_path=root_path,
            response_cache_bytes=size(response_cache, "--response-cache"),
        ),
    )
    if print_format is not None:
        pods = Pods(image, claim, secret=secret, memory=pod_memory)
        found = (
            serve_config(config, port) if print_format is Format.serve else ray_service(config, port, pods)
        )
        yaml.dump(found, sys.stdout, Dumper=readable(yaml.SafeDumper), sort_keys=False)
        return
    from optkit.fleet.cluster import DEFAULT_ADDRESS, Cluster
    from optkit.fleet.secrets import auth_token
    from optkit.fleet.update import deployed

    place = address or os.environ.get("RAY_DASHBOARD_ADDRESS") or DEFAULT_ADDRESS
    cluster = Cluster(place, auth_token())
    present = deployed(cluster.applications(), name)
    if not served_model_name:
        config = present.with_names(config)
    others = present.without(config.digest)
    if others and strategy is Strategy.rolling:
        _roll(cluster, present, config, port, max_surge, canary_bound)
    else:
        cluster.deploy(serve_config(config, port), others)
    if timeout:
        cluster.wait([replicas_name(config), name], timeout)
    state = "runs" if timeout else "is being started"
    console.stdout.print(
        f"{name} {state} on {cluster.address}: {replicas} replicas of {opened.name}, port {port}"
    )


def _roll(
    cluster: Cluster, present: Deployed, config: FleetConfig, port: int, max_surge: int, bound: float
) -> None:
    """Replace the replicas of another artifact; ends the command after a rollback."""
    import asyncio

    from optkit.fleet.rollout import Phase, Rollout
    from optkit.fleet.update import ClusterControl, update

    control = ClusterControl(cluster, present, config, port, bound)
    begun = time.monotonic()

    def tell(line: str) -> None:
        console.stderr.print(f"{time.monotonic() - begun:6.1f} s  {line}")

    count = config.replicas if config.autoscale is None else max(config.replicas, present.counts[control.old])
    try:
        rollout = Rollout(control.old, control.new, count, max_surge=max_surge)
    except ValueError as error:
        raise UserError(
            str(error), where=f"--max-surge {max_surge}", fix="give 1, or --strategy recreate"
        ) from error
    tell(f"{config.name}: {control.old[:12]} is replaced by {control.new[:12]}")
    try:
        asyncio.run(update(control, rollout, tell))
    except KeyboardInterrupt:
        fix = "the same command goes on; deploy the old artifact to go back"
        raise UserError(f"the update was left at {rollout.phase.value}", where=config.name, fix=fix) from None
    if rollout.phase is Phase.FAILED:
        console.stderr.print(f"error: {config.name}: the update was rolled back: {rollout.reason}")
        raise typer.Exit(ROLLED_BACK)


def readable(dumper: Any) -> Any:
    """``dumper`` of YAML with texts of several lines as blocks."""

    class Readable(dumper):  # type: ignore[misc]
        pass

    def text(writer: Any, value: str) -> Any:
        return writer.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Readable.add_representer(str, text)
    return Readable
