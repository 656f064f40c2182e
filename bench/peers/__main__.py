"""The command: ``python -m bench.peers --artifact artifact/ --model smollm2-135m``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import readme_table
from bench.peers.llama_cpp_peer import LlamaCpp
from bench.peers.measure import Run
from bench.peers.openvino_peer import OpenVino
from bench.peers.optkit_peer import Optkit
from bench.peers.peer import ROOT, Model, Peer, public, reason
from bench.peers.transformers_peer import Transformers
from bench.peers.vllm_peer import Vllm
from bench.peers.workloads import WORKLOADS, quick
from optkit.bench import workload
from optkit.checkpoint.locate import ALIASES, packaged_gguf, resolve
from optkit.errors import UserError, nearest
from optkit.text.load import load_tokenizer

PEERS: dict[str, Callable[[], Peer]] = {
    "transformers-fp32": Transformers,
    "llama.cpp-q4_0": lambda: LlamaCpp("Q4_0"),
    "llama.cpp-q8_0": lambda: LlamaCpp("Q8_0"),
    "openvino-q4_1": lambda: OpenVino("Q4_1"),
    "openvino-q8_0": lambda: OpenVino("Q8_0"),
    "vllm-w8a8": lambda: Vllm("w8a8"),
    "vllm-bf16": lambda: Vllm("bf16"),
    "vllm-fp32": lambda: Vllm("fp32"),
}
DEFAULT = [name for name in PEERS if name != "vllm-fp32"]  # vLLM is faster in bfloat16, where the CPU has it
LOCAL = ROOT / "bench" / "results" / "peers-local.json"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Measure optkit and other engines over HTTP, with the same prompts and the same client.",
        epilog=f"Peers: {', '.join(PEERS)}. Without --only: optkit and all but vllm-fp32.",
    )
    parser.add_argument(
        "--artifact", action="append", default=[], help="DIR or NAME=DIR; may be given more than once"
    )
    parser.add_argument("--model", required=True, help="what the artifacts were made from")
    parser.add_argument("--gguf", type=Path, help="the model as GGUF, if --model is not one")
    parser.add_argument("--only", help="comma-separated: optkit and names of peers")
    parser.add_argument(
        "--install", action=argparse.BooleanOptionalAction, default=True, help="make missing environments"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, one request a client: a smoke test")
    parser.add_argument(
        "--retune", action="store_true", help="try llama.cpp's options again (do this on a quiet machine)"
    )
    parser.add_argument("--save-result", type=Path, default=LOCAL, help="default: %(default)s, not committed")
    return parser.parse_args(arguments)


def artifact_peers(arguments: Sequence[str]) -> list[Peer]:
    """A column for each ``DIR`` or ``NAME=DIR``."""
    pairs = [text.rpartition("=")[::2] for text in arguments]
    peers = [Optkit(name or "optkit", Path(folder)) for name, folder in pairs]
    names = [peer.name for peer in peers]
    if len(set(names)) != len(names):
        raise UserError("two artifacts have one name", where=", ".join(names), fix="write NAME=DIR")
    if set(names) & set(PEERS):
        raise UserError("an artifact is named like a peer", where=", ".join(names))
    return list(peers)


def chosen(only: str | None, artifacts: Sequence[Peer]) -> list[Peer]:
    """The peers to measure, artifacts first. ``optkit`` stands for all artifacts."""
    names = only.split(",") if only else ["optkit", *DEFAULT]
    for name in names:
        if name != "optkit" and name not in PEERS:
            raise UserError("no such peer", where=name, fix=nearest(name, ["optkit", *PEERS]))
    if "optkit" in names and not artifacts:
        raise UserError(
            "no artifact to measure", where="--artifact", fix="give one, or leave optkit out of --only"
        )
    return [*(artifacts if "optkit" in names else []), *(PEERS[name]() for name in names if name in PEERS)]


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


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        artifacts = artifact_peers(options.artifact)
        peers = chosen(options.only, artifacts)
        model = find_model(options.model, options.gguf)
        if options.retune:
            LlamaCpp.forget_trials(model)
        usable, skipped = ready(peers, model, options.install)
        ids = workload.text_ids(load_tokenizer(str(model.directory)))
        loads = quick(WORKLOADS) if options.quick else WORKLOADS
        run = Run(model, loads, 1 if options.quick else options.rounds, ids, progress)
        measured = run.measure(usable, skipped)
    except UserError as error:
        progress(f"error: {error}")
        return 2
    measured.artifacts = [peer.name for peer in artifacts]
    measured.environment["command"] = ["python", "-m", "bench.peers", *(public(word) for word in arguments)]
    measured.save(options.save_result)
    print(readme_table.peers_block(options.save_result.stem, measured.to_dict()))
    return readme_table.main([])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
