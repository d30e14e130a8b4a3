"""Whether any thread of a program has a number above 0, by one meeting of its threads.

A maximum over everything does it too, but goes through five exchanges in a warp, shared memory, two meetings and two
exchanges more, one waiting for the other, while nothing else is done. The GPU has an instruction for this question.
"""

import os

import triton
import triton.language as tl

from longspan.kernels.gpus import highest

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def ready_to_vote(): ...

    @triton.jit
    def voted(x):
        return tl.max(x) > 0

else:

    @triton.jit
    def ready_to_vote():
        """To be called once, before any vote: declares where a thread's own answer is kept."""
        tl.inline_asm_elementwise(
            ".reg .b32 longspan_vote; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def voted(x):
        """Whether any element of `x` is above 0, for all threads, which must all come here. However `x` is spread.

        The second vote, within a warp, changes no answer: it tells the assembler that a warp has one. Without it what
        a branch on the answer leads to is made for warps that part, with no addresses in uniform registers.
        """
        tl.inline_asm_elementwise(
            "mov.b32 longspan_vote, 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            """{
            .reg .b32 %mine;
            set.gt.u32.f32 %mine, $1, 0f00000000;
            or.b32 longspan_vote, longspan_vote, %mine;
            mov.b32 $0, 0;
            }""",
            "=r,f",
            [x],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        answer = tl.inline_asm_elementwise(
            """{
            .reg .pred %any;
            setp.ne.b32 %any, longspan_vote, 0;
            bar.red.or.pred %any, 0, %any;
            vote.sync.any.pred %any, %any, 0xffffffff;
            selp.b32 $0, 1, 0, %any;
            }""",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return answer > 0


@triton.jit
def any_above_0(x, VOTES: tl.constexpr):
    """Whether any element of `x` is above 0: by a vote, or for rows of numbers by a maximum."""
    return voted(x) if VOTES else highest(x) > 0
