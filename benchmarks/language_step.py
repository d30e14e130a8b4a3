"""A training step of the paper's language model on one GPU: tokens a second and MFU, softmax against ASEntmax.

The `420m` preset with LLaMA-3's vocabulary and its 524,288 tokens a step, in parts of 32,768, on random tokens: softmax
with RoPE by PyTorch's attention (flash or cuDNN, whichever it takes), ASEntmax with NAPE by ours, softmax with NAPE by
ours. Rounds alternate between the models.

    python benchmarks/language_step.py --contexts 2048 16384
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from longspan.functional.scores import Rules
from longspan.nn import Attention
from longspan.nn.decoder import AttentionConfig
from longspan.nn.llama import PRESETS, Llama, flops_per_token, preset
from longspan.results import append_rows, provenance
from longspan.train.config import OptimizerConfig
from longspan.train.lm import summed_losses
from longspan.train.lm_loop import peak_flops
from longspan.train.optimizers import Optimizer

TOKENS = 524_288  # a step, the paper's
AT_ONCE = 32_768  # tokens of a part
CELLS = (("softmax", "rope", "torch"), ("asentmax", "nape", "longspan"), ("softmax", "nape", "longspan"))


def torch_attention(q: Tensor, k: Tensor, v: Tensor, rules: Rules, scales: Tensor | None) -> Tensor:
    assert scales is None
    assert rules.slopes is None
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rules.scale)


def step_of(name: str, method: str, position: str, by: str, context: int, tokens: int) -> Callable[[], float]:
    """A function that takes one step and returns its loss; the clock is to be read after it."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = preset(name, attention=AttentionConfig(method=method, position=position, slopes="exponential"))
    model = Llama(config).to(device)
    for layer in model.modules():
        if isinstance(layer, Attention) and by == "torch":
            layer._attend = torch_attention  # type: ignore[method-assign]
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        for block in model.blocks:
            block.compile()
    optimizer = Optimizer(model, OptimizerConfig(learning_rate=3e-4, betas=(0.9, 0.95), weight_decay=0.1))
    judge = torch.compile(summed_losses) if device == "cuda" else summed_losses
    ids = torch.randint(0, config.vocabulary, (tokens // context, context + 1), device=device)
    counted = torch.ones(len(ids), context, device=device)

    def step() -> float:
        total = torch.zeros((), device=device)
        for part in ids.split(max(1, AT_ONCE // context)):
            with torch.autocast(device, torch.bfloat16):
                logits = model(part[:, :-1])
            loss = judge(logits, part[:, 1:], counted[: len(part)])
            (loss / tokens).backward()
            total += loss.detach() / tokens
        gradients: dict[str, Tensor] = {name: weight.grad for name, weight in model.named_parameters()}  # type: ignore[misc]
        optimizer.step(gradients)
        model.zero_grad(set_to_none=True)
        return total.item()  # waits for the device

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="420m", choices=list(PRESETS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 16_384])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="Of a step.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/language_step.jsonl"))
    given = parser.parse_args()
    if any(given.tokens % context for context in given.contexts):
        parser.error("a context must divide the tokens of a step")
    origin = provenance()
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu")) or math.nan
    print(f"{'context':>8} {'method':10} {'position':9} {'by':9} {'ms':>8} {'tokens/s':>9} {'MFU':>6}  to the first")
    for context in given.contexts:
        steps = {cell: step_of(given.preset, *cell, context, given.tokens) for cell in CELLS}
        times: dict[tuple[str, str, str], list[float]] = {cell: [] for cell in CELLS}
        for step in steps.values():  # compiles
            step()
        for _ in range(given.rounds):
            for cell, step in steps.items():
                begun = time.perf_counter()
                step()
                times[cell].append(time.perf_counter() - begun)
        first = statistics.median(times[CELLS[0]])
        for cell in CELLS:
            seconds = statistics.median(times[cell])
            speed = given.tokens / seconds
            utilisation = speed * flops_per_token(preset(given.preset), context) / peak
            row = {"preset": given.preset, "context": context, "method": cell[0], "position": cell[1], "by": cell[2]}
            row |= {"milliseconds": 1e3 * seconds, "tokens_per_second": speed, "utilisation": utilisation}
            append_rows(given.out, [row | {"tokens": given.tokens, "rounds": given.rounds} | origin])
            print(
                f"{context:8} {cell[0]:10} {cell[1]:9} {cell[2]:9} {1e3 * seconds:8.1f} {speed:9.0f} "
                f"{utilisation:6.3f}  {seconds / first:.3f}",
                flush=True,
            )
        del steps, step


if __name__ == "__main__":
    main()
