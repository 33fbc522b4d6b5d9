"""Simulation of fused_kernel's roles with random interleavings. See main() for what is varied."""
import random, sys, collections, heapq, math

class Bad(Exception): pass

class Bar:
    def __init__(s, name, count): s.name, s.count, s.left, s.phase, s.waiters, s.asleep = name, count, count, 0, {}, []
    def arrive(s):
        s.left -= 1
        if s.left < 0: raise Bad(f"over-arrival {s.name}")
        if s.left == 0:
            s.left = s.count; s.phase += 1
            for t in s.asleep: SIM.push(t)
            s.asleep.clear()
            for who, want in s.waiters.items():
                if s.phase >= want + 2: raise Bad(f"LAPPED while waiting: {who} on {s.name} phase {want}, now {s.phase}")
    def wait(s, who, want, parity):
        """want: the phase (number) meant; parity: as the kernel computes it."""
        assert parity == want & 1, (s.name, want, parity)
        s.waiters[who] = want
        if s.phase >= want + 2: raise Bad(f"LAPPED before wait: {who} on {s.name} phase {want}, now {s.phase}")
        while s.phase & 1 == parity: yield s
        yield None
        del s.waiters[who]
        if s.phase < want + 1: raise Bad(f"EARLY: {who} on {s.name} phase {want}, now {s.phase}")

class Ring:
    def __init__(s, name, n): s.name, s.slot = name, [None] * n
    def put(s, i, seq, value, readers, who):
        i %= len(s.slot)
        old = s.slot[i]
        if old and old[2]: raise Bad(f"OVERWRITTEN {s.name}[{i}] seq {old[0]}={old[1]} unread by {old[2]} with seq {seq}={value}")
        s.slot[i] = [seq, value, set(readers)]
    def get(s, i, seq, who):
        i %= len(s.slot)
        e = s.slot[i]
        if not e or e[0] != seq: raise Bad(f"WRONG SLOT {who} reads {s.name}[{i}] wants seq {seq} finds {e}")
        e[2].discard(who)
        return e[1]

PULLED, LEFT, TAKEN, TAKEN2, W0 = 0, 1, 2, 3, 4

class Sim:
    def __init__(s, p, rnd): s.p, s.rnd = p, rnd; s.mem = collections.defaultdict(int); s.steps = 0; s.rare = rnd.choice((0, 0, .01, .05))

    def launch(s):
        p = s.p
        s.heap = []; s.asleep = []; s.now = 0.; s.live = 0; s.cwait = {}
        global SIM; SIM = s
        s.done1 = collections.Counter(); s.done2 = collections.Counter(); s.parts = collections.Counter()
        s.pulled_by = 0; s.written_units = set()
        tt = p['tt']
        s.unit_ends = []; s.tile_ends = []; u = t = 0
        for x in tt: u += x * p['nf1']; t += x * p['nf2']; s.unit_ends.append(u); s.tile_ends.append(t)
        s.nu, s.nt = u, t
        for c in range(p['ctas']): CTA(s, c)
        s.run()
        for k, v in s.mem.items():
            if v: raise Bad(f"counter {k} is {v} after the launch")
        n1, n2 = p['n1'], p['per2']
        if any(s.done1[(i, r)] != 1 for i in range(2 * s.nu) for r in range(n1)) or sum(s.done1.values()) != 2 * s.nu * n1: raise Bad("L1 tiles not once")
        if any(s.done2[i] != n2 for i in range(s.nt)) or sum(s.done2.values()) != n2 * s.nt: raise Bad("L2 tiles not once")

    def spawn(s, name, gen, speed): s.live += 1; s.push([name, gen, speed])

    def push(s, t, sleep=0):
        """Let a task go on after a random while; one step takes it about 1 / speed, now and then much longer."""
        x = s.rnd.random()
        d = -math.log(1 - s.rnd.random()) / t[2]
        if x < s.rare: d *= 40
        heapq.heappush(s.heap, (s.now + d + sleep, s.rnd.random(), t))

    def run(s):
        n = 0
        while s.heap:
            n += 1
            s.now, _, t = heapq.heappop(s.heap)
            try: y = next(t[1])
            except StopIteration: s.live -= 1; continue
            if y is None: s.push(t)
            elif isinstance(y, int): s.push(t, y)
            elif isinstance(y, Bar): y.asleep.append(t)
            else: s.asleep.append(t)
        s.steps += n
        if s.live:
            raise Bad("DEADLOCK: " + ", ".join(t[0] for t in s.asleep))

    def add(s, k):
        s.mem[k] += 1
        for t in s.asleep: s.push(t)
        s.asleep.clear()
        return s.mem[k] - 1

    def poll(s, who, cond, counters):
        s.cwait[who] = counters
        while not cond(): yield s
        yield None
        if not cond(): raise Bad(f'{who}: counter reset under it')
        del s.cwait[who]

class CTA:
    def __init__(c, s, i):
        p = s.p; c.s, c.p, c.i = s, p, i
        S, R = p['S'], p['R']; n = f"cta{i}."
        c.empty = [Bar(f"{n}empty{k}", p['per2']) for k in range(S)]
        c.full = [Bar(f"{n}full{k}", 1) for k in range(S)]
        c.told = [Bar(f"{n}told{k}", 1) for k in range(R)]
        c.turn = [Bar(f"{n}turn{k}", 1) for k in range(2)]
        c.written = [Bar(f"{n}written{k}", p['n1']) for k in range(p['W'])]
        c.noted = [Bar(f"{n}noted{k}", 1) for k in range(p['W'])]
        c.pulled, c.begun, c.ended = Bar(n + "pulled", 2), Bar(n + "begun", 2), Bar(n + "ended", 1)
        c.tiles = Ring(n + "tiles", R); c.units = Ring(n + "units", p['KNOWN']); c.counts = Ring(n + "counts", 1)
        c.stage = [None] * S
        sp = lambda: s.rnd.choice(p['speeds'])
        for r in (0, 1): s.spawn(f"{n}c{r}", c.consumer(r), sp())
        s.spawn(n + "p", c.producer(), sp()); s.spawn(n + "t", c.teller(), sp())

    # shared
    def delay(c, kind):
        d = c.p['delay'][kind]
        if d and c.s.rnd.random() < .5: yield c.s.rnd.randrange(d)
        else: yield None

    def wait_empty(c, step):
        S = c.p['S']; n = step // S
        yield from c.empty[step % S].wait(f"p{c.i}", n - 1, (n & 1) ^ 1)
    def wait_full(c, step, r):
        S = c.p['S']; n = step // S
        yield from c.full[step % S].wait(f"c{c.i}.{r}", n, n & 1)

    # consumer
    def consumer(c, r):
        s, p = c.s, c.p; who = f"c{c.i}.{r}"
        yield from c.delay('pull'); s.pulled_by += 1
        c.pulled.arrive(); yield None
        yield from s.poll(who, lambda: s.mem[PULLED] >= p['ctas'], [PULLED])
        if s.pulled_by != 2 * p['ctas']: raise Bad("rows read before pulled")
        c.begun.arrive(); yield None
        if r < p['n1']:
            step, count = yield from c.told_tiles(r, 0, 0, 1)
        else:
            yield from c.ended.wait(who, 0, 0)
            count, step = c.counts.get(0, 0, r)
            yield None
        yield from c.told_tiles(r, step, count, 2)

    def told_tiles(c, r, step, count, level):
        s, p = c.s, c.p; who = f"c{c.i}.{r}"
        K = p['k1'] if level == 1 else p['k2']
        per = p['n1'] if level == 1 else p['per2']; num = p['n1'] if level == 1 else 2
        alt = num // per
        event = multiplied = 0
        count += r // per; step += r // per * K
        def wait_tile():
            R = p['R']; n = count // R
            yield from c.told[count % R].wait(who, n, n & 1)
            yield from c.delay('read')
            return c.tiles.get(count, count, r)
        tile = yield from wait_tile()
        while tile[1] >= 0:
            if tile[0] != level: raise Bad(f"{who} in L{level} told a tile of L{tile[0]}")
            if alt == 2:
                yield from c.turn[r].wait(who, multiplied - (1 - r), (multiplied & 1) ^ (1 - r)); multiplied += 1
            if level == 2: c.check_units(tile[1], who)
            step = yield from c.mainloop(r, step, K, tile, p['chain'], alt)
            yield from c.delay('epilogue')
            if level == 1:
                s.done1[(tile[1], r)] += 1
                if event % 2 == 1:
                    yield from c.arrive(event // 2, who, tile[1] // 2)
            else: s.done2[tile[1]] += 1
            step += (alt - 1) * K; count += alt; event += 1
            tile = yield from wait_tile()
        if tile[0] != level: raise Bad(f"{who} in L{level} read the end of L{tile[0]}")
        if level == 1: yield from c.arrive(event // 2, who, None)
        return step, count + 1

    def check_units(c, index, who):
        s = c.s
        e = sum(end <= index for end in s.tile_ends)
        lo = s.unit_ends[e - 1] if e else 0
        for u in range(lo, s.unit_ends[e]):
            if u not in s.written_units: raise Bad(f"{who}: L2 tile {index} before unit {u} written")

    def arrive(c, n, who, unit):
        W = c.p['W']; m = n // W
        yield from c.noted[n % W].wait(who, m - 1, (m & 1) ^ 1)
        if unit is not None:
            c.s.parts[unit] += 1
            if c.s.parts[unit] == c.p['n1']: c.s.written_units.add(unit)
        yield None
        c.written[n % W].arrive(); yield None

    def mainloop(c, r, step, K, tile, chain, alt):
        S = c.p['S']
        def issue(st, k):
            yield from c.wait_full(st, r)
            x = c.stage[st % S]
            if x[0] != (st, tile, k) or r not in x[1]: raise Bad(f"c{c.i}.{r} step {st} tile {tile} k {k} finds {x}")
            yield None
        def release(st):
            x = c.stage[st % S]
            if x[0][0] != st: raise Bad("stage overwritten while read")
            x[1].discard(r)
            c.empty[st % S].arrive(); yield None
        k = 0
        while k < K:
            n = chain if K - k >= chain else 1
            yield from issue(step, k)
            for b in range(n - 1):
                yield from issue(step + b + 1, k + b + 1)
                yield from c.delay('mma')
                yield from release(step + b)
            yield from c.delay('mma')
            yield from release(step + n - 1)
            step += n; k += n
        if alt == 2: c.turn[1 - r].arrive(); yield None
        return step

    # producer
    def tell(c, count, tile, readers):
        yield from c.delay('tell')
        c.tiles.put(count, count, tile, readers, 'p'); yield None
        c.told[count % c.p['R']].arrive(); yield None

    def load(c, step, K, tile, readers):
        S = c.p['S']
        for k in range(K):
            yield from c.wait_empty(step)
            yield from c.delay('load')
            st = step % S
            if c.stage[st] and c.stage[st][1]: raise Bad(f"stage {st} overwritten while unread: {c.stage[st]}")
            c.stage[st] = [None, set(readers)]
            c.s.spawn(f"cta{c.i}.tma", c.tma(st, (step, tile, k)), c.s.rnd.choice(c.p['speeds']))
            step += 1
        return step

    def tma(c, st, what):
        yield from c.delay('tma')
        if what[1][0] == 2: c.check_units(what[1][1], f"tma{c.i}")
        c.stage[st][0] = what
        c.full[st].arrive()

    def take(c, k):
        return c.s.add(k)

    def producer(c):
        s, p = c.s, c.p; who = f"p{c.i}"; mem = s.mem
        n1, per2 = set(range(p['n1'])), p['per2']
        r2 = lambda c_, base: {0, 1} if per2 == 2 else {(c_ - base) % 2}
        yield from s.poll(who, lambda: mem[PULLED] >= p['ctas'], [PULLED])
        step = count = 0
        unit = c.take(TAKEN); yield None
        while unit < s.nu:
            c.units.put(count // 2, count // 2, unit, {'t'}, 'p'); yield None
            for half in range(2):
                tile = (1, 2 * unit + half)
                yield from c.wait_empty(step)
                yield from c.tell(count, tile, n1)
                step = yield from c.load(step, p['k1'], tile, n1)
                count += 1
            yield from c.delay('take')
            unit = c.take(TAKEN); yield None
        c.units.put(count // 2, count // 2, -1, {'t'}, 'p'); yield None
        yield from c.wait_empty(step)
        yield from c.tell(count, (1, -1), n1)
        count += 1
        c.counts.put(0, 0, (count, step), {1} if p['n1'] == 1 else (), 'p'); yield None
        c.ended.arrive(); yield None
        base = count; known = -1
        U, L = p['UNITS'], p['LANES']
        index = c.take(TAKEN2); yield None
        while index < s.nt:
            e = sum(end <= index for end in s.tile_ends)
            before = max([end for end in s.tile_ends if end <= index], default=0)
            first_tile = before // p['nf2']
            begin, end = first_tile * p['nf1'], (first_tile + p['tt'][e]) * p['nf1']
            if e != known:
                last = -(-end // U)
                for f in range(begin // U, last, L):
                    cs = [k for k in range(f, f + L) if k < last]
                    cond = lambda: all(mem[W0 + k] >= min(s.nu - k * U, U) for k in cs)
                    yield from s.poll(who, cond, [W0 + k for k in range(f, f + L)])
                known = e
            yield from c.wait_empty(step)
            yield from c.tell(count, (2, index), r2(count, base))
            step = yield from c.load(step, p['k2'], (2, index), r2(count, base))
            yield from c.delay('take')
            index = c.take(TAKEN2); yield None
            count += 1
        for i in range(2 // per2):
            yield from c.wait_empty(step + i)
            yield from c.tell(count + i, (2, -1), r2(count + i, base))
        yield from c.begun.wait(who, 0, 0)
        yield None
        if s.add(LEFT) == p['ctas'] - 1:
            yield None
            end = W0 + -(-s.nu // U)
            for f in range(0, end, L):
                for k in range(f, f + L):
                    for w, ks in s.cwait.items():
                        if k in ks and k < end: raise Bad(f"{w} waits on counter {k} when it is reset")
                    mem[k] = 0
                    yield None

    def teller(c):
        s, p = c.s, c.p; who = f"t{c.i}"; W = p['W']
        yield from c.pulled.wait(who, 0, 0)
        yield from c.delay('note')
        s.add(PULLED); yield None
        n = 0
        while True:
            m = n // W
            yield from c.written[n % W].wait(who, m, m & 1)
            c.noted[n % W].arrive(); yield None
            yield from c.delay('read')
            unit = c.units.get(n, n, 't'); yield None
            if unit < 0: return
            yield from c.delay('note')
            if unit not in s.written_units: raise Bad(f"teller {who} told unit {unit} early")
            s.add(W0 + unit // p['UNITS']); yield None
            n += 1

def params(rnd, force):
    tiling = force.get('tiling') or rnd.choice(('few', 'shared'))
    S = rnd.choice((4, 5, 6))
    p = dict(tiling=tiling, ctas=rnd.randrange(1, 7), S=S, k1=rnd.randrange(1, 6), k2=rnd.randrange(1, 6),
             nf1=rnd.randrange(1, 4), nf2=rnd.randrange(1, 5), UNITS=rnd.choice((2, 4, 32)), LANES=rnd.choice((2, 32)),
             W=4, KNOWN=16, n1=1 if tiling == 'few' else 2, per2=1 if tiling == 'few' else 2,
             chain=1 if tiling == 'few' else 4)
    most = rnd.choice((1, 2, 4, 8))
    p['tt'] = [rnd.choice((0, rnd.randrange(most + 1))) for _ in range(rnd.randrange(1, 7))]
    if rnd.random() < .03: p['tt'] = [0] * len(p['tt'])
    p['speeds'] = rnd.choice(((1,), (1, 1, .1), (1, .3, .03), (1, .01)))
    p['delay'] = {k: rnd.choice((0, 0, 3, 30, 200)) for k in ('pull', 'read', 'epilogue', 'mma', 'tell', 'load', 'tma', 'take', 'note')}
    p.update({k: v for k, v in force.items() if k != 'extra'})
    if 'kmin' in force: p['k1'], p['k2'] = max(p['k1'], force['kmin']), max(p['k2'], force['kmin'])
    if 'one' in force: p[rnd.choice(('k1', 'k2'))] = 1; p['delay']['read'] = p['delay']['epilogue'] = rnd.choice((30, 200))
    p['R'] = p['S'] + force.get('extra', 0)
    return p

def one(seed, force):
    rnd = random.Random(seed)
    p = params(rnd, force)
    sim = Sim(p, rnd)
    try:
        for _ in range(rnd.choice((1, 2, 3))): sim.launch()
    except Bad as e: return seed, p, str(e)
    return seed, p, None

def worker(a): return one(*a)

def main():
    import multiprocessing as mp, time
    n = int(sys.argv[1]); start = int(sys.argv[2]); force = eval(sys.argv[3]) if len(sys.argv) > 3 else {}
    t = time.time(); bad = collections.Counter(); ex = {}; ks = collections.Counter(); tot = collections.Counter()
    with mp.Pool() as pool:
        for seed, p, e in pool.imap_unordered(worker, ((start + i, force) for i in range(n)), 16):
            key = (p['tiling'], 'S' + str(p['S']), 'k1=1' if p['k1'] == 1 else 'k1>1', 'k2=1' if p['k2'] == 1 else 'k2>1'); tot[key] += 1
            if e:
                import re
                kind = re.sub(r'\d+', '#', e.split(':')[0] if e.startswith('DEAD') else e)[:60]; bad[kind] += 1; ks[key] += 1
                if kind not in ex or len(str(p)) < len(str(ex[kind][1])): ex[kind] = (seed, p, e)
    print(f"{n} runs {sum(bad.values())} bad {time.time()-t:.0f}s")
    for k, v in bad.most_common(): print(v, k, '\n    e.g.', ex[k])
    for k in sorted(tot): 
        if ks[k]: print(k, ks[k], '/', tot[k])

if __name__ == '__main__': main()
