"""The command: ``python -m bench.peers --artifact artifact/ --model smollm2-135m``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench import readme_table
from bench.peers import sweep, trials
from bench.peers.isa import ISAS, NATIVE
from bench.peers.llama_cpp_peer import LlamaCpp
from bench.peers.measure import Run, wait_until_quiet
from bench.peers.openvino_peer import OpenVino
from bench.peers.optkit_peer import Optkit
from bench.peers.peer import MAX_CLIENTS, ROOT, Model, Peer, public, reason
from bench.peers.result import Measured
from bench.peers.transformers_peer import Transformers
from bench.peers.vllm_peer import Vllm
from bench.peers.workloads import WORKLOADS, quick
from optkit.bench import workload
from optkit.bench.workload import WorkloadConfig
from optkit.checkpoint.locate import ALIASES, packaged_gguf, resolve
from optkit.errors import UserError, nearest
from optkit.machine.paths import check_place
from optkit.text.load import load_tokenizer

PEERS: dict[str, Callable[[str], Peer]] = {
    "transformers-fp32": partial(Transformers, "float32"),
    "transformers-bf16": partial(Transformers, "bfloat16"),
    "llama.cpp-q4_0": partial(LlamaCpp, "Q4_0"),
    "llama.cpp-q8_0": partial(LlamaCpp, "Q8_0"),
    "openvino-q4_1": partial(OpenVino, "Q4_1"),
    "openvino-q8_0": partial(OpenVino, "Q8_0"),
    "vllm-w8a8": partial(Vllm, "w8a8"),
    "vllm-bf16": partial(Vllm, "bf16"),
    "vllm-fp32": partial(Vllm, "fp32"),
}
# vLLM takes 3 GB and minutes to start; bfloat16 is slower than float32 for small models, and without its instructions
DEFAULT = [name for name in PEERS if not name.startswith("vllm") and name != "transformers-bf16"]
RESULTS = ROOT / "bench" / "results"
LOCAL, LOCAL_SWEEP = (
    {isa: RESULTS / f"{kind}-local{'' if isa == NATIVE else f'-{isa}'}.json" for isa in ISAS}
    for kind in ("peers", "sweep")
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Measure optkit and other engines over HTTP, with the same prompts and the same client.",
        epilog=f"Peers: {', '.join(PEERS)}. Without --only: optkit and all but vLLM.",
    )
    parser.add_argument(
        "--artifact", action="append", default=[], help="DIR or NAME=DIR; may be given more than once"
    )
    parser.add_argument("--model", required=True, help="what the artifacts were made from")
    parser.add_argument("--gguf", type=Path, help="the model as GGUF, if --model is not one")
    parser.add_argument("--only", help="comma-separated: optkit and names of peers")
    parser.add_argument(
        "--isa",
        choices=ISAS,
        default=NATIVE,
        help="hold every engine to AVX2, or to AVX-512 without AMX; default: %(default)s",
    )
    parser.add_argument(
        "--install", action=argparse.BooleanOptionalAction, default=True, help="make missing environments"
    )
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help="comma-separated, fewer for a large model; default: %(default)s",
    )
    parser.add_argument("--rounds", type=int, help="default: 8; 2 of each load with --sweep")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round, one request a client, no trials, no waiting: a smoke test",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="load against latency, from requests in turn to all at once, in place of the figures",
    )
    parser.add_argument("--rates", type=int, default=5, help="rates of --sweep; default: %(default)s")
    parser.add_argument("--retune", action="store_true", help="try the options of the chosen peers again")
    parser.add_argument("--save-result", type=Path, help="default: peers-local*.json, not committed")
    options = parser.parse_args(arguments)
    if options.sweep and options.workloads != parser.get_default("workloads"):
        parser.error("--workloads are the figures', and --sweep has a load of its own")
    options.rounds = options.rounds or (2 if options.sweep else 8)
    options.save_result = options.save_result or (LOCAL_SWEEP if options.sweep else LOCAL)[options.isa]
    return options


def artifact_peers(arguments: Sequence[str], isa: str = NATIVE) -> list[Peer]:
    """A column for each ``DIR`` or ``NAME=DIR``."""
    pairs = [text.rpartition("=")[::2] for text in arguments]
    peers = [Optkit(name or "optkit", Path(folder), isa) for name, folder in pairs]
    names = [peer.name for peer in peers]
    if len(set(names)) != len(names):
        raise UserError("two artifacts have one name", where=", ".join(names), fix="write NAME=DIR")
    if set(names) & set(PEERS):
        raise UserError("an artifact is named like a peer", where=", ".join(names))
    return list(peers)


def chosen(only: str | None, artifacts: Sequence[Peer], isa: str = NATIVE) -> list[Peer]:
    """The peers to measure, artifacts first. ``optkit`` stands for all artifacts."""
    names = only.split(",") if only else ["optkit", *DEFAULT]
    for name in names:
        if name != "optkit" and name not in PEERS:
            raise UserError("no such peer", where=name, fix=nearest(name, ["optkit", *PEERS]))
    if "optkit" in names and not artifacts:
        raise UserError(
            "no artifact to measure", where="--artifact", fix="give one, or leave optkit out of --only"
        )
    return [*(artifacts if "optkit" in names else []), *(PEERS[name](isa) for name in names if name in PEERS)]


def chosen_workloads(names: str) -> dict[str, WorkloadConfig]:
    """The named workloads, in the order of ``WORKLOADS``."""
    for name in names.split(","):
        if name not in WORKLOADS:
            raise UserError("no such workload", where=name, fix=nearest(name, list(WORKLOADS)))
    return {name: config for name, config in WORKLOADS.items() if name in names.split(",")}


def find_model(name: str, gguf: Path | None) -> Model:
    source = resolve(name, progress)
    return Model(source.name, source.directory, gguf or own_gguf(name))


def own_gguf(name: str) -> Path | None:
    """The GGUF file given by ``--model``, or None."""
    if Path(name).is_file():
        return Path(name)
    return packaged_gguf(name) if name in ALIASES and not Path(name).is_dir() else None


def ready(peers: Sequence[Peer], model: Model, install: bool) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are installed with a converted model, and the reasons for all skipped peers."""
    usable, skipped = [], {}
    for peer in peers:
        try:
            if install:
                peer.install(progress)
            elif not peer.installed():
                raise UserError("not installed", where=peer.name, fix="run without --no-install")
            peer.prepare(model, progress)
            usable.append(peer)
        except UserError as error:
            skipped[peer.name] = reason(error)
            progress(f"{peer.name}: skipped, {skipped[peer.name]}")
    return usable, skipped


def tuned(
    peers: Sequence[Peer], model: Model, ids: Sequence[int], retune: bool
) -> tuple[list[Peer], dict[str, str]]:
    """The peers with options chosen by trial, and the reasons for those without a working candidate."""
    usable, skipped = [], {}
    if retune:
        trials.forget(peers, model)
    if any(trials.missing(peer, model) for peer in peers):
        wait_until_quiet(progress)
    for peer in peers:
        try:
            trials.choose_options(peer, model, ids, progress)
            usable.append(peer)
        except UserError as error:
            skipped[peer.name] = reason(error)
            progress(f"{peer.name}: skipped, {skipped[peer.name]}")
    return usable, skipped


def untuned(peers: Sequence[Peer]) -> list[Peer]:
    """The peers with their first candidate, for a smoke test."""
    for peer in peers:
        peer.options = next(iter(peer.candidates()), {})
    return list(peers)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(
    peers: Sequence[Peer],
    skipped: dict[str, str],
    model: Model,
    ids: Sequence[int],
    options: argparse.Namespace,
) -> Measured | sweep.PeersSweep:
    """A smoke test with ``--quick``; otherwise the trials that are missing, then all rounds on a quiet machine."""
    workloads, rounds, load = options.workloads, options.rounds, sweep.LOAD
    if options.quick:
        usable, workloads, rounds = untuned(peers), quick(options.workloads), 1
        load = replace(load, num_prompts=MAX_CLIENTS)
    else:
        usable, failed = tuned(peers, model, ids, options.retune)
        skipped = skipped | failed
        wait_until_quiet(progress)
    if options.sweep:
        return sweep.measure(model, ids, usable, skipped, progress, rounds, options.rates, load)
    return Run(model, workloads, rounds, ids, progress).measure(usable, skipped)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        check_place(options.save_result)
        options.workloads = chosen_workloads(options.workloads)
        artifacts = artifact_peers(options.artifact, options.isa)
        peers = chosen(options.only, artifacts, options.isa)
        model = find_model(options.model, options.gguf)
        usable, skipped = ready(peers, model, options.install)
        ids = workload.text_ids(load_tokenizer(str(model.directory)))
        result = measure(usable, skipped, model, ids, options)
    except UserError as error:
        progress(f"error: {error}")
        return 2
    measured = result.measured if isinstance(result, sweep.PeersSweep) else result
    measured.isa = options.isa
    measured.artifacts = [peer.name for peer in artifacts]
    measured.environment["command"] = ["python", "-m", "bench.peers", *(public(word) for word in arguments)]
    block = readme_table.sweep_block if options.sweep else readme_table.peers_block
    print(block(options.save_result.stem, result.to_dict()))
    try:
        result.save(options.save_result)
    except UserError as error:
        progress(f"error: {error}")
        return 2
    return readme_table.main([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
