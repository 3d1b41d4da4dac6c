"""Estimator, correction and loss together, as the trainer calls them, without Ray or vLLM: layouts and cuts that must not matter,
enumerated gradients, and a tabular task that each of the eight estimators and five presets learns."""
import itertools, math, warnings
import pytest, torch
from hypothesis import given, settings, strategies as st
from molt_nb.corrections import CORRECTIONS, centre_scores
from molt_nb.estimators import ESTIMATORS, Rollouts, Rows, compute_advantages
from molt_nb.losses import AGGREGATIONS, LOSSES, Objective, add_stats, aggregate, finish_stats, policy_loss, value_loss, window_denominators

F64 = torch.float64
many = settings(max_examples=30, deadline=None, derandomize=True, database=None)
OPTIONS = dict(tis=dict(high=1.1), icepop=dict(low=.8, high=1.3), mis=dict(low=.3, high=3.), seq_mask_tis=dict(low=.9, high=1.15, token_cap=1.2), flash=dict(high=.03), none={},
               importance=dict(of='tv', level='token', mode='mask', high=.2))
COLUMNS = ('logprobs', 'old_logprobs', 'ref_logprobs', 'teacher_logprobs', 'values', 'theta')

def stories(seed, R=6):
    "Rollouts as they happened: a reward, a group and per token the numbers of COLUMNS, float64 [6, K]."
    g = torch.Generator().manual_seed(seed); rand = lambda *s: torch.randn(*s, generator=g, dtype=F64)
    out = []
    for j in range(R):
        K = int(torch.randint(1, 9, (1,), generator=g)); old = -rand(K).abs() - .1
        out.append((rand(1).item(), j // 2, torch.stack([old - .2*rand(K), old, old + .3*rand(K), old + .3*rand(K), rand(K), old + .1*rand(K)])))
    return out

def layout(told, seed=None, split=False, observe=False, junk=math.nan):
    "The same stories as rows. `seed` draws where rows are cut, where observations stand and in which order rollouts come."
    g = torch.Generator().manual_seed(seed or 0); coin = lambda: bool(torch.rand(1, generator=g) < .4)
    rows, names = [], list(range(len(told)))
    for j in (torch.randperm(len(told), generator=g).tolist() if seed else names):
        row = [None]
        for k in range(told[j][2].shape[1]):
            if split and row[1:] and coin(): rows.append((j, row)); row = [None]
            if observe and coin(): row += [None, None]
            row.append(k)
        rows.append((j, row))
    N, L = len(rows), max(len(r) for _, r in rows)
    mask = torch.tensor([[t < len(r) and r[t] is not None for t in range(L)] for _, r in rows])
    columns = torch.full((len(COLUMNS), N, L), junk, dtype=F64); start = [0]; place = torch.zeros(N, L, dtype=torch.int64)
    for _, _, x in told: start.append(start[-1] + x.shape[1])
    for n, (j, r) in enumerate(rows):
        for t, k in enumerate(r):
            if k is not None: columns[:, n, t] = told[j][2][:, k]; place[n, t] = start[j] + k
    c = dict(zip(COLUMNS, columns)); theta = c.pop('theta')
    ro = Rollouts([s[0] for s in told], [s[1] for s in told], [False]*len(told), [L]*len(told))
    return ro, Rows(tokens=place, valid=torch.ones(N, L, dtype=torch.bool), mask=mask, versions=torch.zeros(N, L).int(), rollout=torch.tensor([j for j, _ in rows]), **c), torch.cat([s[2][5] for s in told])

def gradient(batch, estimator, objective, parts=None):
    "Gradient by token in the order of the stories, and statistics, of one optimizer window."
    ro, rows, theta = batch; theta = theta.clone().requires_grad_(); sums = {}
    A = ESTIMATORS[estimator](ro, rows); A = A[0] if isinstance(A, tuple) else A
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        w, keep, _ = objective.correction(rows.old_logprobs, rows.logprobs, rows.mask, rows.rollout, **objective.correction_options)
    D = window_denominators(rows, ro, objective.aggregation, objective.budget)
    for i in parts or [torch.arange(len(rows))]:
        some = rows[i]; logp = torch.where(some.mask, theta[some.tokens], math.nan)
        top = torch.stack([logp, logp - 1.], -1)
        some.top_logprobs = torch.stack([some.logprobs, some.logprobs - 1.5], -1)
        part, stats = policy_loss(objective, logp, some, w[i], keep[i], A[i], D, logp**2, top); part.backward(); sums = add_stats(sums, stats)
    return theta.grad, finish_stats(sums)

def objective(correction, loss, how, **more):
    return Objective(CORRECTIONS[correction], OPTIONS[correction], LOSSES[loss], {'eps_low': .05, 'eps_high': .05} if loss == 'gspo' else {}, how, kl_coef=.1, entropy_coef=.01, budget=16, **more)

choices = st.tuples(st.integers(1, 10_000), st.sampled_from(list(ESTIMATORS)), st.sampled_from(list(OPTIONS)), st.sampled_from(AGGREGATIONS))

@many
@given(choices, st.sampled_from(list(LOSSES)), st.booleans(), st.integers(1, 6))
def test_the_split_into_micro_batches_does_not_matter(choice, loss, centring, n):
    seed, estimator, correction, how = choice; centring &= CORRECTIONS[correction].pointwise
    batch = layout(stories(seed), seed, split=True, observe=True); o = objective(correction, loss, how, score_centering=centring)
    order = torch.randperm(len(batch[1]), generator=torch.Generator().manual_seed(seed))
    (a, s), (b, t) = gradient(batch, estimator, o), gradient(batch, estimator, o, order.chunk(n))
    assert a.norm() > 0 and (a - b).norm() <= 1e-10 * a.norm()
    assert s.keys() == t.keys() and all(abs(s[k] - t[k]) <= 1e-10 * max(1, abs(s[k])) for k in s) and ('loss/centering' in s) == centring

@many
@given(choices, st.sampled_from(['ppo', 'cispo']))
def test_rows_observations_order_and_junk_do_not_matter(choice, loss):
    "gspo is left out: its ratio is the row's."
    seed, estimator, correction, how = choice; told = stories(seed); o = objective(correction, loss, how)
    whole, _ = gradient(layout(told), estimator, o); assert whole.norm() > 0
    for other in (dict(split=True), dict(observe=True), dict(split=True, observe=True, junk=1e6)):
        moved, _ = gradient(layout(told, seed, **other), estimator, o)
        assert (whole - moved).norm() <= 1e-10 * whole.norm(), other

@many
@given(st.integers(1, 10_000), st.floats(.5, .999), st.floats(0, 1), st.sampled_from([0., .2]))
def test_long_ragged_rollouts_against_a_walk(seed, gamma, lam, beta):
    g = torch.Generator().manual_seed(seed); n = torch.randint(1, 300, (5,), generator=g)
    told = [(float(j), 0, torch.randn(6, int(k), generator=g, dtype=F64)) for j, k in enumerate(n)]
    ro, rows, _ = layout(told, seed, split=True, observe=True)
    G, _ = ESTIMATORS['reinforce'](ro, rows, gamma=gamma, kl_coef=beta, whitened=False)
    A, _, returns = ESTIMATORS['gae'](ro, rows, gamma=gamma, lam=lam, kl_coef=beta, whitened=False)
    W = ESTIMATORS['gae'](ro, rows, gamma=gamma, lam=lam, kl_coef=beta)[0][rows.mask]
    assert abs(W.mean()) < 1e-9 and abs(W.var(unbiased=False) - 1) < 1e-4
    place = rows.tokens[rows.mask]; at = 0
    for reward, _, x in told:
        mu, old, ref, _, V, _ = x; g_, a, v = 0., 0., 0.; want = []
        for k in reversed(range(x.shape[1])):
            r = (reward if k == x.shape[1] - 1 else 0.) - beta * (old[k] - ref[k]).item()
            g_ = r + gamma * g_; a = r + gamma * v - V[k].item() + gamma * lam * a; v = V[k].item(); want.append((g_, a, a + v))
        mine = [(place == at + k).nonzero().item() for k in range(x.shape[1])]; at += x.shape[1]
        for got, w in zip((G, A, returns), zip(*want)): assert (got[rows.mask][mine] - torch.tensor(w[::-1], dtype=F64)).abs().max() <= 1e-10 * max(1, max(map(abs, w)))

# the world of chapter 11: two steps, three choices each; policy, behaviour and rewards are tables
g = torch.Generator().manual_seed(3); draw = lambda *s: torch.randn(*s, generator=g, dtype=F64)
FIRST, SECOND, REWARD, PATHS = draw(3), draw(3, 3), draw(3, 3), torch.tensor(list(itertools.product(range(3), repeat=2)))
NOISE = .5*draw(3), .5*draw(3, 3)

def path(first, second): a, b = PATHS.T; return torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]], 1)

def enumerated(estimator, correction, n, stale, **options):
    "Expected gradient over every group of `n` rollouts sampled from the behaviour, through the real policy_loss; ascent direction."
    theta = [FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()]; logp = path(*theta)
    mu = path(FIRST + NOISE[0], SECOND + NOISE[1]).detach() if stale else logp.detach()
    pad = lambda x: torch.cat([torch.zeros(len(x), 1, dtype=F64), x], 1); total, R = 0., REWARD.flatten()
    mask = torch.tensor([[False, True, True]]).expand(n, 3)
    for picks in itertools.product(range(9), repeat=n):
        i = torch.tensor(picks); ro = Rollouts(R[i], [0]*n, [False]*n, [3]*n)
        rows = Rows(torch.zeros(n, 3).long(), mask, mask, pad(mu[i]), mask.int(), torch.arange(n), pad(logp[i]).detach())
        A = ESTIMATORS[estimator](ro, rows); A = A[0] if isinstance(A, tuple) else A
        o = Objective(CORRECTIONS[correction], options, aggregation='fixed', budget=1)
        w, keep, _ = o.correction(rows.old_logprobs, rows.logprobs, mask, rows.rollout, **options)
        total = total - mu[i].sum().exp() * policy_loss(o, pad(logp[i]), rows, w, keep, A, window_denominators(rows, ro, 'fixed', 1))[0]
    return torch.cat([x.flatten() for x in torch.autograd.grad(total, theta)])

def truth():
    theta = [FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()]
    return torch.cat([x.flatten() for x in torch.autograd.grad((path(*theta).sum(1).exp() * REWARD.flatten()).sum(), theta)])

@pytest.mark.parametrize('estimator,share', [('rloo', 1.), ('dr_grpo', 1/2), ('flash_reinforce', 1/2)])
@pytest.mark.parametrize('stale', [False, True])
def test_expected_gradient_with_rollout_weights(estimator, share, stale):
    "On-policy, and off-policy where mis rejects nothing: exactly the policy gradient, times (n-1)/n without leave-one-out. Token weights are off."
    exact = enumerated(estimator, 'mis', 2, stale, low=0., high=math.inf)
    assert torch.allclose(exact, share * truth(), atol=1e-12)
    if stale:
        for biased, options in (('tis', dict(high=math.inf)), ('none', {})): assert (enumerated(estimator, biased, 2, True, **options) - exact).norm() > .1 * exact.norm()

def test_grpo_climbs_another_hill():
    g = enumerated('grpo', 'none', 2, False)
    assert .5 < torch.cosine_similarity(g, truth(), 0) < .999

def test_value_loss_does_not_depend_on_the_split():
    batch = layout(stories(5), 5, split=True); ro, rows, theta = batch; rows.returns = ESTIMATORS['gae'](ro, rows)[2]; D = window_denominators(rows, ro, 'token_mean')
    def grad(parts):
        x = theta.clone().requires_grad_()
        for i in parts: aggregate(value_loss(x[rows.tokens[i]], rows.values[i], rows.returns[i], rows.mask[i], .2)[0], rows.mask[i], rows[i], D).backward()
        return x.grad
    a = grad([torch.arange(len(rows))]); assert a.norm() > 0 and (a - grad(torch.arange(len(rows)).chunk(3))).norm() <= 1e-12 * a.norm()

def learn(estimator, correction, seed, steps=80, tasks=4, n=8, V=5):
    """Four tasks, an answer of two tokens, reward: the share that is right. Tables for policy, critic and teacher; the engine is one version old.
    Returns mean reward of the first and of the last five batches, and the last statistics."""
    g = torch.Generator().manual_seed(seed); target = torch.randint(V, (tasks, 2), generator=g)
    table, critic = torch.zeros(tasks, 2, V, requires_grad=True), torch.zeros(tasks, 2, requires_grad=True)
    teacher = (4. * torch.nn.functional.one_hot(target, V)).log_softmax(-1); old_table = table.detach().clone()
    adam, slow = torch.optim.Adam([table], lr=.1), torch.optim.Adam([critic], lr=.1)
    task = torch.arange(tasks).repeat_interleave(n); N = len(task); mask = torch.tensor([[False, True, True]]).expand(N, 3); curve = []
    options = dict(seq_mask_tis=dict(low=.8, high=1.25), flash=dict(high=.1)).get(correction, {}); how = ESTIMATORS[estimator].aggregation or 'token_mean'
    o = Objective(CORRECTIONS[correction], options, aggregation=how, budget=2); pad = lambda x: torch.cat([torch.zeros(N, 1), x], 1)
    for _ in range(steps):
        engine = old_table.log_softmax(-1); old_table = table.detach().clone()
        tokens = torch.distributions.Categorical(logits=engine[task].flatten(0, 1)).probs.multinomial(1, generator=g).view(N, 2)
        of = lambda logits: pad(logits[task].gather(2, tokens[..., None])[..., 0])
        R = (tokens == target[task]).double().mean(1); curve.append(R.mean().item()); logp = of(table.log_softmax(-1))
        rows = Rows(pad(tokens).long(), mask | True, mask, of(engine), mask.int(), torch.arange(N), logp.detach(), teacher_logprobs=of(teacher), values=pad(critic[task]).detach())
        ro = Rollouts(R, task, torch.zeros(N), torch.full((N,), 3), n)
        A, _ = compute_advantages(ESTIMATORS[estimator], ro, rows)
        w, keep, stats = o.correction(rows.old_logprobs, rows.logprobs, mask, rows.rollout, **options)
        D = window_denominators(rows, ro, how, 2)
        adam.zero_grad(); policy_loss(o, logp, rows, w, keep, A, D)[0].backward(); adam.step()
        if rows.returns is not None: slow.zero_grad(); aggregate(value_loss(pad(critic[task]), rows.values, rows.returns, mask)[0], mask, rows, D).backward(); slow.step()
    return sum(curve[:5])/5, sum(curve[-5:])/5, stats

@pytest.mark.parametrize('estimator,correction', [(e, 'flash' if e == 'flash_reinforce' else 'tis') for e in ESTIMATORS] + [('grpo', c) for c in ('icepop', 'mis', 'seq_mask_tis', 'flash')])
def test_it_learns(estimator, correction):
    for seed in range(3):
        torch.manual_seed(seed); before, after, stats = learn(estimator, correction, seed)
        assert before < .4 and after > .8, (seed, before, after, stats)
