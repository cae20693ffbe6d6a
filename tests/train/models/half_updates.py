"""Prints a static program's operators with fused updates of float32 and bfloat16 parameters."""

import json
import os
import sys
from typing import Any

os.environ["FLAGS_enable_pir_api"] = "0"

import paddle

from fleetrun.inject.static import fused_optimizer

paddle.enable_static()
static: Any = paddle.static
operators = {}
for dtype in ("float32", "bfloat16"):
    main = static.Program()
    with static.program_guard(main, static.Program()):
        block: Any = main.global_block()
        rate = block.create_var(name="rate", shape=[1], dtype="float32", persistable=True)
        for name in "ab":
            kinds = ("Param", "Grad", "Velocity")
            of = {k: block.create_var(name=k + name, shape=[4], dtype=dtype) for k in kinds}
            block.append_op(
                type="momentum",
                inputs={**of, "LearningRate": rate},
                outputs={"ParamOut": of["Param"], "VelocityOut": of["Velocity"]},
                attrs={"mu": 0.9},
            )
    fused_optimizer.run(main)
    operators[dtype] = [op.type for op in main.global_block().ops]
json.dump(operators, sys.stdout)
