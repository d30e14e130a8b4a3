"""The losses of the first 20 steps of one small run of every method, so that no change of the numbers goes unseen.

After a change that is meant to move them, print the table anew and say in the commit why it moved:

    python tests/test_golden_losses.py
"""

from dataclasses import replace

import pytest

import longspan
from longspan.nn.decoder import AttentionConfig
from longspan.paper.recipes import recipe, smoke
from longspan.train.trainer import Trainer

STEPS = 20

GOLDEN = {
    "softmax": """
        2.36952 2.34419 2.31471 2.29248 2.24858 2.19455 2.27882 2.10132 2.07858 2.14599
        2.02314 2.07136 2.09427 2.04937 1.96856 2.06690 2.07473 2.00279 2.00214 2.06406
        """,
    "ssmax": """
        2.41046 2.38718 2.31782 2.29513 2.25119 2.24543 2.29482 2.12820 2.15400 2.18832
        2.13775 2.12857 2.16184 2.13582 2.06689 2.11495 2.14511 2.06104 2.06235 2.11629
        """,
    "assmax": """
        2.41318 2.38278 2.31780 2.27454 2.23434 2.19539 2.28345 2.09991 2.09064 2.17230
        2.03199 2.08084 2.11968 2.05512 1.99259 2.06215 2.09878 2.04399 2.02896 2.10024
        """,
    "entmax": """
        2.38584 2.35560 2.35655 2.30061 2.27562 2.26506 2.28901 2.18738 2.16368 2.20395
        2.14462 2.18331 2.18960 2.15337 2.10603 2.15803 2.16842 2.14775 2.11279 2.14061
        """,
    "sentmax": """
        2.40246 2.37953 2.36655 2.31855 2.27032 2.24621 2.24756 2.20021 2.16428 2.21834
        2.15833 2.15237 2.19204 2.17111 2.13416 2.15446 2.16635 2.14877 2.11665 2.13771
        """,
    "asentmax": """
        2.40629 2.38747 2.33824 2.29577 2.28919 2.25333 2.28990 2.15705 2.13052 2.19516
        2.13094 2.13727 2.16468 2.12367 2.11281 2.13725 2.13712 2.09232 2.09775 2.13372
        """,
    "topk": """
        2.37179 2.34168 2.32678 2.29207 2.26628 2.20790 2.27784 2.12420 2.10216 2.15487
        2.04133 2.08368 2.07372 2.04316 1.98070 2.07419 2.08583 2.00248 2.00846 2.07459
        """,
    "adaptive_temperature": """
        2.37750 2.34900 2.34359 2.30870 2.25138 2.25538 2.28951 2.16978 2.14617 2.18414
        2.10493 2.16201 2.12844 2.10992 2.05133 2.14445 2.10841 2.10807 2.05276 2.10351
        """,
    "stick_breaking": """
        2.38638 2.35490 2.34674 2.32508 2.27204 2.26983 2.28578 2.17906 2.16751 2.20846
        2.15672 2.16700 2.18040 2.13905 2.11605 2.15840 2.14439 2.11007 2.08898 2.15086
        """,
}


def losses(method: str) -> list[float]:
    position = "nope" if method == "stick_breaking" else "nape"
    config = smoke(recipe("longspan/copy/nape/asentmax"))
    # Not the recipe's own attention, which may improve.
    attention = AttentionConfig(method, position, top_k=8, rope_original_length=64, qk_norm=True)
    trainer = Trainer(
        replace(
            config,
            model=replace(config.model, attention=attention),
            optimizer=replace(config.optimizer, warmup=5),
            steps=STEPS,
            batch=16,
        )
    )
    found = []
    for _ in range(STEPS):
        trainer.advance()
        found.append(trainer.metrics().loss)
    return found


def test_every_method_has_its_losses() -> None:
    assert list(GOLDEN) == list(longspan.methods())


@pytest.mark.parametrize("method", GOLDEN)
def test_the_losses_are_the_golden_ones(method: str) -> None:
    expected = [float(number) for number in GOLDEN[method].split()]
    assert expected[-1] < expected[0] - 0.1, "nothing was learned, so nothing is tested"
    # Another processor adds in another order; 20 steps carry that to about 1e-5.
    assert losses(method) == pytest.approx(expected, rel=1e-3)


if __name__ == "__main__":
    for name in longspan.methods():
        numbers = [f"{loss:.5f}" for loss in losses(name)]
        print(f'    "{name}": """')
        for start in range(0, STEPS, 10):
            print(f"        {' '.join(numbers[start : start + 10])}")
        print('        """,')
