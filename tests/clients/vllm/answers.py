"""Greedy answers of vLLM with log probabilities, as JSON: ``python answers.py DIRECTORY '[[1, 2, 3], ...]' 8``.

Runs in an environment with vLLM and without optkit's code.
"""

from __future__ import annotations

import json
import sys


def main(directory: str, prompts: str, max_tokens: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    model = LLM(directory, enforce_eager=True, max_model_len=256, dtype="bfloat16", disable_log_stats=True)
    sampling = SamplingParams(temperature=0, max_tokens=int(max_tokens), logprobs=1, ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
    found = []
    for output in model.generate(asked, sampling, use_tqdm=False):
        answer = output.outputs[0]
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        found.append([(token, likely[token].logprob) for token, likely in pairs])
    sys.stdout.write("ANSWERS " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
