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
    """MB by pid that the process has alone (USS), and that part of it which it has written; and the names.
    The rest of the USS is code read from files: it counts for whoever is the last to use it, so it jumps when a neighbour ends."""
    out, written, names = {}, {}, {}
    for p in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try: kb = dict(re.findall(r'^(\w+): +(\d+)', open(f'/proc/{p.pid}/smaps_rollup').read(), re.M)); names[p.pid] = name(p)
        except (psutil.Error, OSError): continue
        written[p.pid] = int(kb['Private_Dirty'])/1024; out[p.pid] = written[p.pid] + int(kb['Private_Clean'])/1024
    return out, written, names

async def main(steps):
    out = ROOT/'runs'/f'endurance-{time.strftime("%Y%m%d-%H%M%S")}'; run = AsyncLoop(load_recipe('tiny', WORDS, steps=steps, out_dir=str(out))); seen, dirty, t = {}, {}, time.time()
    try:
        await run.start()
        for k in range(1, steps + 1):
            await run.step()
            if k % max(1, steps//20) == 0:
                seen[k], dirty[k], names = memory(); used = seen[k]; print(f'step {k}: {sum(used.values()):.0f} MB in {len(used)} processes, {(time.time() - t)/k:.2f} s a step', flush=True)
        run.pool.check(); ledger = run.pool.ledger()
        live = await asyncio.wrap_future(run.engines.handles['engine0'].status.remote().future())
    finally: await run.close()
    start = min(k for k in seen if k >= steps//10); last = max(seen)
    table = lambda seen: {f'{names[p]} {i}': {str(k): round(m[p], 2) for k, m in seen.items() if p in m} for i, p in enumerate(sorted(seen[last])) if p in seen[start]}
    rows, written = table(seen), table(dirty); grown = lambda rows: {n: round(m[str(last)]/m[str(start)] - 1, 4) for n, m in rows.items()}
    found = dict(steps=steps, overrides=WORDS, seconds=round(time.time() - t), staleness_max=max(h['staleness/max'] for h in run.history), optimizer_steps=run.history[-1]['optimizer_step'], mismatch_max=max(h['sync/mismatch'] for h in run.history),
                 live=live['live'], ledger=ledger, from_step=start, growth=grown(rows), growth_written=grown(written), uss_mb=rows, written_mb=written)
    print(json.dumps({k: v for k, v in found.items() if not k.endswith('_mb')}, indent=1))
    if steps >= 1000: (NBS/'evidence'/'endurance.json').write_text(json.dumps(found, indent=1) + '\n')
    shutil.rmtree(out)

if __name__ == '__main__': asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
