"""Environments, command lines and what is published of them. Nothing is installed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from bench.peers import llama_cpp_peer, openvino_peer, peer
from bench.peers.isa import VARIABLES, with_variables
from bench.peers.llama_cpp_peer import LlamaCpp, cmake_args, instruction_sets
from bench.peers.openvino_peer import OpenVino
from bench.peers.openvino_server import Completions, Lines, printed_properties, send
from bench.peers.optkit_peer import Optkit
from bench.peers.transformers_peer import Transformers
from bench.peers.vllm_peer import Vllm, quantize_w8a8
from optkit.errors import UserError
from optkit.machine.target import cpu_isa


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "PEERS", tmp_path / ".peers")
    made = peer.Model("tiny", tmp_path / "source")
    made.cache.mkdir(parents=True)
    return made


def after(words, option):
    return words[words.index(option) + 1]


def test_llama_cpp_runs_with_the_chosen_options(model, monkeypatch):
    monkeypatch.setattr(llama_cpp_peer, "usable_cores", lambda: 2)
    side = LlamaCpp("Q4_0")
    side.binaries = Path("/bin")
    side.options = {"flash-attn": "off", "ubatch-size": "512"}
    assert side.options in side.candidates()
    words = side.command(model, 81)
    assert words[0] == "/bin/llama-server"
    assert (after(words, "--flash-attn"), after(words, "--ubatch-size")) == ("off", "512")
    assert (after(words, "--threads"), after(words, "--port"), after(words, "--parallel")) == ("2", "81", "8")
    assert int(after(words, "--ctx-size")) == 8 * peer.MAX_MODEL_LEN


def test_llama_cpp_has_a_build_for_each_instruction_set(monkeypatch):
    monkeypatch.setattr("bench.peers.llama_cpp_peer.cpu_isa", lambda: ("avx2", "avx512_vnni"))
    native, avx2, avx512 = (LlamaCpp("Q4_0", isa) for isa in ("native", "avx2", "avx512"))
    assert len({each.venv.folder for each in (native, avx2, avx512)}) == 3
    assert "-DGGML_AVX512_VNNI=ON" in cmake_args("avx512") and "AMX" not in cmake_args("avx512")
    assert native.venv.env["CMAKE_ARGS"] == cmake_args("native")
    assert "-DGGML_NATIVE=ON" in cmake_args("native") and "GGML_AVX" not in cmake_args("native")
    assert "-DGGML_NATIVE=OFF" in cmake_args("avx2") and "-DGGML_AVX2=ON" in cmake_args("avx2")


def test_llama_cpp_runs_without_amx_where_the_cpu_has_it(monkeypatch):
    monkeypatch.setattr("bench.peers.llama_cpp_peer.cpu_isa", lambda: ("avx2", "amx_int8"))
    native = LlamaCpp("Q4_0")
    assert native.venv.folder == LlamaCpp("Q4_0", "avx512").venv.folder
    assert native.venv.env["CMAKE_ARGS"] == cmake_args("avx512")


def test_llama_cpp_lists_the_instruction_sets_of_its_build():
    log = "x\nsystem_info: n_threads = 2 / 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | \ny = 1"
    assert instruction_sets(log) == "SSE3, AVX2, REPACK"
    with pytest.raises(UserError, match="does not list"):
        instruction_sets("nothing")


def test_the_variables_of_an_instruction_set_reach_the_process():
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    words = [sys.executable, "-c", code]
    seen = json.loads(peer.run(with_variables(words, "avx2")))
    assert VARIABLES["avx2"].items() <= seen.items()
    assert with_variables(words, "native") == words


VECTOR_WORK = """
import sys, time
from pathlib import Path
import numpy, torch
from bench.peers.process_group import _avx512_elapsed
begin = time.monotonic()
for _ in range(300):
    numpy.exp(numpy.ones(100000, numpy.float32)).sum()
    torch.ones(200, 200) @ torch.ones(200, 200)
    bytes(1 << 16).find(b"x")
time.sleep(0.02)
window = 1e3 * (time.monotonic() - begin)
print(any(0 <= ms < window for ms in _avx512_elapsed(Path("/proc/self"))))
"""


@pytest.mark.skipif(
    "avx512bw" not in cpu_isa() or not Path("/proc/self/arch_status").is_file(),
    reason="needs AVX-512 and the kernel's record of its use",
)
@pytest.mark.parametrize(("isa", "seen"), [("native", "True"), ("avx2", "False")])
def test_numpy_torch_and_glibc_under_the_variables_of_avx2_leave_avx512_alone(isa, seen):
    words = with_variables([sys.executable, "-c", VECTOR_WORK], isa)
    assert peer.run(words, {"PYTHONPATH": str(peer.ROOT)}).strip() == seen


def test_torch_under_the_variables_of_avx2_reports_avx2():
    assert peer.torch_capability(sys.executable, "avx2") in ("torch AVX2", "torch DEFAULT", "torch NO AVX")


def test_optkit_under_the_variables_of_avx2_reports_avx2(tmp_path):
    word = Optkit("a", tmp_path, "avx2").reported_isa()
    assert word.startswith(("avx2 kernels, torch AVX2", "none kernels"))


def test_a_peer_that_needs_a_gguf_says_so(model):
    with pytest.raises(UserError, match="--gguf"):
        model.need_gguf()


def test_openvino_serves_its_own_conversion(model):
    side = OpenVino("Q8_0")
    side.options = {"max_num_batched_tokens": "2048", "INFERENCE_PRECISION_HINT": "f32"}
    assert side.options in side.candidates()
    assert side.command(model, 82)[1:] == [
        *(str(openvino_peer.SERVER), str(model.cache / "openvino-Q8_0"), "--port", "82"),
        *("--max-num-batched-tokens", "2048", "--property", "INFERENCE_PRECISION_HINT=f32"),
    ]
    assert openvino_peer.SERVER.is_file()


def gguf(file: Path, kind: int) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(str(file), "llama")
    writer.add_file_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_openvino_reads_a_q4_1_model_as_it_is(model, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(openvino_peer, "run", commands.append)
    source = gguf(tmp_path / "model.Q4_1.gguf", 3)
    side, own = OpenVino("Q4_1"), dataclasses.replace(model, gguf=source)
    side.prepare(own, lambda _: None)
    (command,) = commands
    assert command[-1] == str(side.folder(own) / "model.gguf")
    assert Path(command[-1]).resolve() == source
    with pytest.raises(UserError, match="is Q8_0, not Q4_1"):
        side.prepare(dataclasses.replace(model, gguf=gguf(tmp_path / "other.gguf", 7)), lambda _: None)


def test_openvino_server_talks_in_lines_of_json():
    reading, writing = os.pipe()
    lines = Lines(reading)
    assert not lines.ready(wait=False)
    with os.fdopen(writing, "wb") as stream:
        send(stream, [7, [1, 2]])
        stream.write(b"[8,[3")
        stream.flush()
        assert lines.ready(wait=True) and list(lines.read()) == [[7, [1, 2]]]
        stream.write(b']]\n{"a":1}\n')
        stream.flush()
        assert list(lines.read()) == [[8, [3]], {"a": 1}]
    with pytest.raises(EOFError):
        lines.read()
    os.close(reading)


def test_openvino_server_streams_what_its_engine_says():
    """The engine is a process that answers each prompt with its length, a token at a time."""
    code = (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    number, prompt, count = json.loads(line)\n"
        "    for _ in range(count):\n"
        "        print(json.dumps([number, [len(prompt)]]), flush=True)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        answers = Lines(child.stdout.fileno())
        side = Completions(child.stdin, answers, Letters(), "openvino")
        with TestClient(side.app({"version": "1"})) as http:
            assert http.get("/settings").json() == {"version": "1"}
            ask = {"prompt": [5, 6], "max_tokens": 3, "stream": True, "ignore_eos": True, "temperature": 0}
            body = http.post("/v1/completions", json=ask).text
            assert http.post("/v1/completions", json={**ask, "temperature": 1}).status_code == 400
        child.stdin.close()
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    assert "".join(c["text"] for e in events for c in e["choices"]) == "ccc"
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body.endswith("data: [DONE]\n\n") and not side.queues


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


def test_openvino_properties_are_read_from_its_log():
    log = "  KV_CACHE_PRECISION: f16\nnoise\n  LOG_LEVEL: NONE\n  KV_CACHE_PRECISION: u8\n"
    assert printed_properties(log) == {"KV_CACHE_PRECISION": "u8"}


def test_vllm_serves_the_int8_checkpoint_or_the_source(model):
    int8, fp32 = Vllm("w8a8").command(model, 83), Vllm("fp32").command(model, 83)
    assert after(int8, "--model") == str(model.cache / "w8a8")
    assert after(fp32, "--model") == str(model.directory)
    assert after(Vllm("bf16").command(model, 83), "--dtype") == "bfloat16"
    assert int8[0] == "env" and "--no-enable-prefix-caching" in int8


def test_w8a8_has_a_scale_a_row(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.25], [0.0, 0.0]])
    name = "model.layers.0.mlp.up_proj.weight"
    others = {"model.norm.weight": torch.ones(2), "model.embed_tokens.weight": torch.ones(4, 2)}
    save_file({name: weight, **others}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    quantize_w8a8(source, target)
    tensors = load_file(target / "model.safetensors")
    scale = tensors[name.removesuffix("weight") + "weight_scale"]
    assert tensors[name].dtype == torch.int8 and scale.shape == (3, 1)
    assert torch.allclose(tensors[name] * scale, weight, atol=0.01)
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized" and config["model_type"] == "llama"
    assert (target / "tokenizer.json").is_file()


def test_optkit_and_transformers_are_started_by_optkit_bench(model, tmp_path):
    assert Optkit("optkit", tmp_path).command(model, 84)[1:5] == [
        "-m",
        "optkit.cli.main",
        "serve",
        str(tmp_path),
    ]
    command = Transformers("bfloat16").command(model, 85)
    assert "optkit.bench.transformers_server" in command and command[-2:] == ["--dtype", "bfloat16"]
    assert Transformers("bfloat16").name == "transformers-bf16"


def test_an_environment_is_made_once_for_each_set_of_pins(model, monkeypatch):
    commands = []
    monkeypatch.setattr(peer, "run", lambda command, env=None: commands.append((list(command), env)) or "")
    venv = peer.Venv("x", ("a==1",), remove=("b",), env={"FLAG": "1"}, build_env={"JOBS": "2"})
    venv.folder.mkdir(parents=True)
    assert not venv.made()
    venv.make(lambda _line: None)
    assert venv.made()
    words = [command for command, _ in commands]
    assert words[0][1:3] == ["-m", "venv"] and words[1][-1] == "a==1" and words[2][-2:] == ["-y", "b"]
    assert commands[1][1] == {"FLAG": "1", "JOBS": "2"}
    dataclasses.replace(venv, build_env={"JOBS": "1"}).make(lambda _line: None)
    assert len(commands) == 3
    assert not peer.Venv("x", ("a==2",)).made()


def test_a_failing_command_is_a_user_error():
    with pytest.raises(UserError, match="exit code 3: bad luck"):
        peer.run([sys.executable, "-c", "import sys; print('bad luck', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(UserError, match="cannot run"):
        peer.run(["/no/such/program"])


def test_nothing_published_names_a_path_of_this_machine(model):
    words = [sys.executable, str(peer.ROOT / ".peers" / "x"), str(model.directory), str(Path.home() / "y")]
    assert peer.public_command(words, model) == "python .peers/x MODEL ~/y"


def test_a_reason_is_short_and_keeps_both_ends():
    error = UserError("begin " + "x" * 1000 + " the cause")
    assert peer.reason(error).startswith("begin") and peer.reason(error).endswith("the cause")
    assert len(peer.reason(error)) < 320
    assert peer.reason(UserError("no", fix="do")) == "no. do"
