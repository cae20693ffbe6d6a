"""A script that pretends to train, but writes the snapshots that `fleetrun verify` compares."""

# Two parameters, a.weight and b.weight; the case says in what they differ.
SCRIPT = """
import array, base64, json, os, sys
asked = json.loads(os.environ["FLEETRUN_VERIFY"])
rank, case = os.environ["PADDLE_TRAINER_ID"], sys.argv[1]
made = 2 if case == "early" else asked["updates"]
is_plain = "FLEETRUN_STRATEGY_FILE" not in os.environ
assert not case.endswith("fails") or is_plain == (case != "plain fails"), "alas."
assert case != "fails there" or rank != "2" or is_plain, "alas"
if is_plain and case == "noisy":
    noise = 0.01 if "plain-1" in asked["path"] else -0.01
else:
    noise = 0
# As of a script without a seed: each run begins with other weights.
other = case == "unseeded" and "plain-2" in asked["path"]
off = {
    "wrong": 0 if is_plain else 1e-3,
    "rounding": 0 if is_plain else 1e-9,
    "chaotic": 1e-3 if asked["moves"] or not is_plain else 0,
    "ranks": int(rank),
    "plain is wrong": int(rank) if is_plain else 0,
    "second host": 1e-3 if rank in "23" and (asked["moves"] or not is_plain) else 0,
}.get(case, 0)
os.makedirs(asked["path"], exist_ok=True)
with open(os.path.join(asked["path"], rank + ".jsonl"), "a") as file:
    for update in sorted({*range(min(asked["snapshots"], made) + 1), made}):
        last = 3.0 + off * (update > 2) + noise * (update > 0) + other
        values = [[1.0, float(update)], [2.0, last]]
        record = {
            "update": update, "optimizer": 0, "records": os.environ["FLEETRUN_RECORDS"],
            "ranks": int(os.environ["PADDLE_TRAINERS_NUM"]),
            "names": ["a.weight", "b.weight"], "kinds": [0, 0], "dtypes": ["float32"] * 2,
            "sums": [hash(tuple(own)) + (case == "hidden" and not is_plain) for own in values],
            "sizes": [2, 4 if case == "hidden" else 2],
            "largest": [max(own) for own in values],
            "values": [base64.b64encode(array.array("d", own).tobytes()).decode()
                       for own in values],
        }
        print(json.dumps(record), file=file)
if case != "no record":
    with open(os.environ["FLEETRUN_RECORDS"], "a") as file:
        for number in range(1, made + 1):
            at = 100 + number / (1 if is_plain else 2)
            if case == "noisy speed" and "strategy-2" in asked["path"]:
                at = 100 + number * 2
            record = {"number": number, "at": at, "loss": 1 / number}
            print(json.dumps({"schema": 1, "kind": "update", **record}), file=file)
        if case == "no difference" and not is_plain:
            fields = [{"name": name, "asked": True, "status": "no_difference"}
                      for name in ("fuse_all_reduce_ops", "fuse_grad_size_in_MB")]
            record = {"kind": "strategy", "restart": 0, "complete": True, "fields": fields}
            print(json.dumps({"schema": 1, **record}), file=file)
"""
