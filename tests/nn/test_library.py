"""The kernels as operators of torch: as torch wants them, traceable, and the same as the ops."""

import pytest
import torch

import penstock.nn.ops.library  # noqa: F401
from penstock.nn import native, ops
from penstock.nn.packed import PackedWeight

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
EPS = 1e-6


def given(dtype: torch.dtype) -> dict[str, tuple[object, ...]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    packed = PackedWeight.of(draw(70, 48))
    return {
        "packed_linear": (draw(3, 48), packed.memory.data, 70, draw(70)),
        "rms_norm": (draw(3, 48), draw(48), EPS),
        "add_rms_norm": (draw(3, 48), draw(3, 48), draw(48), EPS),
        "rotary": (draw(3, 2, 16), draw(3, 8), draw(3, 8)),
        "silu_mul": (draw(3, 64),),
        "argmax": (draw(3, 50).float(),),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(given(torch.float32)) if native.missing() is None else [])
def test_an_operator_is_the_op(name, dtype):
    args = given(dtype)[name]
    operator = getattr(torch.ops.penstock, name)
    torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(operator, fullgraph=True, backend="eager")
    torch._dynamo.reset()  # what it traced of the others counts towards its limit
    if name == "packed_linear":
        x, lines, outs, bias = args
        expected = ops.packed_linear(x, PackedWeight.over(lines, outs, x.shape[1]), bias, x.dtype)
    else:
        expected = getattr(ops, name)(*args)
    as_tuple = (lambda found: found) if isinstance(expected, tuple) else lambda found: (found,)
    for found in (operator(*args), compiled(*args)):
        assert all(map(torch.equal, as_tuple(found), as_tuple(expected)))


def test_lines_of_another_weight_are_refused():
    with pytest.raises(ValueError, match="a weight of 70 x 48 has"):
        torch.ops.penstock.packed_linear(torch.zeros(1, 48), torch.zeros(5), 70)
