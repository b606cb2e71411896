"""Where data strategies put the pieces of parameters in a search."""

from __future__ import annotations

import torch

from autopar.ir.placement import ParameterLayout
from autopar.ir.sharding import REPLICATE, Shard, local_shape
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Variable
from autopar.machine.mesh import Mesh
from autopar.planner.search.layouts import stored
from autopar.strategies.names import resolve


def test_pieces_inside_which_stripes_do_not_divide() -> None:
    """GPT's fused matrix beside 48 data ranks: 16384 rows do not divide, and of 49152 columns the pieces hold 1024, in
    which the three stripes of a tensor axis do not.
    """
    zero2 = resolve("zero2", Mesh({"dp": 48}))
    variable = Variable("w", TensorType((16384, 49152), torch.float32), torch.float32, True, True)
    striped = (REPLICATE, Shard(1, 3))
    found = stored(variable, ParameterLayout(striped, striped, striped, striped), (48, 4), zero2)
    assert local_shape((16384, 49152), found.stored, (48, 4))
    fits = stored(variable, ParameterLayout(striped, striped, striped, striped), (32, 4), zero2)
    assert fits.stored == (Shard(0), Shard(1, 3))
