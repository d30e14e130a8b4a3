"""What the kernels' tests rely on in the interpreter they run in."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)

import numpy
from interpreter_of_tests import product


@pytest.mark.parametrize("shape", [(16, 64, 16), (32, 32, 24), (3, 16, 33, 64), (130, 77, 80)], ids=str)
def test_an_element_of_a_product_is_the_same_number_wherever_it_stands(shape: tuple[int, ...]) -> None:
    *outer, rows, columns, width = shape
    random = numpy.random.default_rng(0)
    a = random.standard_normal((*outer, rows, width)).astype(numpy.float32)
    b = numpy.repeat(random.standard_normal((*outer, width, 1)), columns, -1).astype(numpy.float32)
    found = product(a, b, numpy.float32)
    assert (found == found[..., :1]).all()
    other_way = product(numpy.swapaxes(b, -1, -2), numpy.swapaxes(a, -1, -2), numpy.float32)
    assert (numpy.swapaxes(other_way, -1, -2) == found).all()
    numpy.testing.assert_allclose(found, a.astype(numpy.float64) @ b, rtol=0, atol=1e-5)
