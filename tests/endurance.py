"""A long run of `tiny`: does any process grow, does a request leak, does the ledger balance, is anything older than allowed ever trained?

    python tests/endurance.py [STEPS]     default 1000, about ten minutes; writes nbs/evidence/endurance.json"""
import asyncio, json, re, shutil, sys, time
import psutil
from notebooks import NBS, ROOT
from molt_nb.async_loop import AsyncLoop
from molt_nb.recipes import load_recipe

WORDS = 'pool.max_staleness=1 algorithm.updates_per_batch=2 policy.lr=1e-5 pool.filter_no_spread=false pool.groups_per_batch=4 pool.samples_per_group=4 pool.groups_in_flight=6 pool.queue_groups=2'

def name(p):
    "What a process is: ray::Engine, VLLM::EngineCore, raylet, ..."
    words = p.cmdline() or [p.name()]; found = re.search(r'ray::\w+|VLLM::\w+|raylet|gcs_server|[\w-]+\.py', ' '.join(words))
    return found[0] if found else words[0].rsplit('/', 1)[-1]

def memory():
    "USS in MB by pid, and the names."
    out, names = {}, {}
    for p in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try: out[p.pid], names[p.pid] = p.memory_full_info().uss/2**20, name(p)
        except psutil.Error: pass
    return out, names

async def main(steps):
    out = ROOT/'runs'/f'endurance-{time.strftime("%Y%m%d-%H%M%S")}'; run = AsyncLoop(load_recipe('tiny', WORDS, steps=steps, out_dir=str(out))); seen, t = {}, time.time()
    try:
        await run.start()
        for k in range(1, steps + 1):
            await run.step()
            if k % max(1, steps//20) == 0:
                used, names = memory(); seen[k] = used; print(f'step {k}: {sum(used.values()):.0f} MB in {len(used)} processes, {(time.time() - t)/k:.2f} s a step', flush=True)
        run.pool.check(); ledger = run.pool.ledger()
        live = await asyncio.wrap_future(run.engines.handles['engine0'].status.remote().future())
    finally: await run.close()
    start = min(k for k in seen if k >= steps//10); last = max(seen)
    rows = {f'{names[p]} {i}': {str(k): round(m[p], 2) for k, m in seen.items() if p in m} for i, p in enumerate(sorted(seen[last])) if p in seen[start]}
    found = dict(steps=steps, overrides=WORDS, seconds=round(time.time() - t), staleness_max=max(h['staleness/max'] for h in run.history), optimizer_steps=run.history[-1]['optimizer_step'], mismatch_max=max(h['sync/mismatch'] for h in run.history),
                 live=live['live'], ledger=ledger, from_step=start, growth={n: round(m[str(last)]/m[str(start)] - 1, 4) for n, m in rows.items()}, uss_mb=rows)
    print(json.dumps({k: v for k, v in found.items() if k != 'uss_mb'}, indent=1))
    if steps >= 1000: (NBS/'evidence'/'endurance.json').write_text(json.dumps(found, indent=1) + '\n')
    shutil.rmtree(out)

if __name__ == '__main__': asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
