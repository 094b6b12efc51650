#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What bench/stream.lua's training step costs when it is streamed with PyTorch alone, for comparison.

The same decoder blocks (Qwen3: RMS norm, q and k norms, rotation, causal attention, SwiGLU) with random bf16 weights
in pinned host memory, one buffer a block. Two device slots and one copy stream: the copy of the next block waits for
the event of the last use of its slot and runs beside the current block. Forward without gradients keeps the blocks'
inputs; backward goes down to the lowest trained block and recomputes each block on its arrival; where it turns, the
block that is there is used again. LoRA (r on q, k, v, o of the upper part) in f32 masters with fused AdamW, its copies
made once a step. Loss: half the mean square of the last hidden state, as in bench/stream.lua. Nothing synchronises
inside a step. This is the plain way that a person would write well, not a tuned one.

    python3 bench/torch_stream.py shape=tiny64 tokens=32 steps=30 json=OUT
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

# layers, channels, heads, kv_heads, hidden; as in bench/random_checkpoint.lua
SHAPES = {
    "tiny64": (64, 256, 2, 1, 768),
    "tiny": (8, 256, 2, 1, 512),
    "qwen3-0.6b": (28, 1024, 16, 8, 3072),
    "qwen3-8b": (36, 4096, 32, 8, 12288),
}
HEAD_DIM = 128
EPS = 1e-6


def layout(channels, heads, kv_heads, hidden):
    """Names and shapes of a block's weights, in the order of its buffer."""
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    return [("norm1", (channels,)), ("q", (q, channels)), ("k", (kv, channels)), ("v", (kv, channels)),
            ("o", (channels, q)), ("q_norm", (HEAD_DIM,)), ("k_norm", (HEAD_DIM,)), ("norm2", (channels,)),
            ("gate", (hidden, channels)), ("up", (hidden, channels)), ("down", (channels, hidden))]


def views(buffer, parts):
    out, at = {}, 0
    for name, shape in parts:
        n = torch.Size(shape).numel()
        out[name] = buffer[at:at + n].view(shape)
        at += n
    return out


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def linear(x, w, adapter, name):
    y = F.linear(x, w[name])
    if adapter is None:
        return y
    a, b, scale = adapter[name]
    return y + F.linear(F.linear(x, a), b) * scale


def block(x, w, adapter, shape, cos, sin):
    """x [tokens, channels] -> [tokens, channels]"""
    _, channels, heads, kv_heads, _ = shape
    t = x.shape[0]
    h = F.rms_norm(x, (channels,), w["norm1"], EPS)
    q = F.rms_norm(linear(h, w, adapter, "q").view(t, heads, HEAD_DIM), (HEAD_DIM,), w["q_norm"], EPS)
    k = F.rms_norm(linear(h, w, adapter, "k").view(t, kv_heads, HEAD_DIM), (HEAD_DIM,), w["k_norm"], EPS)
    v = linear(h, w, adapter, "v").view(t, kv_heads, HEAD_DIM)
    q, k = rotate(q.transpose(0, 1), cos, sin), rotate(k.transpose(0, 1), cos, sin)
    o = F.scaled_dot_product_attention(q[None], k[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True)
    x = x + linear(o[0].transpose(0, 1).reshape(t, heads * HEAD_DIM), w, adapter, "o")
    h = F.rms_norm(x, (channels,), w["norm2"], EPS)
    return x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])


class Stream:
    """Blocks through two device slots, in an order that is known from the start and repeats."""

    def __init__(self, host, parts, order):
        self.host, self.order, self.copies = host, order, torch.cuda.Stream()
        self.slot = [torch.empty_like(host[0], device="cuda") for _ in range(2)]
        self.view = [views(s, parts) for s in self.slot]
        self.holds, self.ready = [None, None], [torch.cuda.Event() for _ in range(2)]
        self.used = [torch.cuda.Event() for _ in range(2)]
        self.at, self.turn, self.bytes = 0, 0, 0
        self.load(0)

    def load(self, at):
        """Bring the block of visit `at` into the slot that is not in use, unless one of them holds it."""
        want = self.order[at % len(self.order)]
        if want in self.holds:
            return
        s = self.turn = 1 - self.turn
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(self.used[s])
            self.slot[s].copy_(self.host[want], non_blocking=True)
            self.ready[s].record()
        self.holds[s] = want
        self.bytes += self.host[want].nbytes

    def visit(self, use):
        s = self.holds.index(self.order[self.at % len(self.order)])
        torch.cuda.current_stream().wait_event(self.ready[s])
        self.turn = s # the next block goes into the other slot
        self.load(self.at + 1)
        out = use(self.view[s])
        self.used[s].record()
        self.at += 1
        return out


def settings():
    out = {"shape": "tiny64", "tokens": "32", "steps": "30", "r": "8", "top_fraction": "0.5", "json": ""}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in out:
            sys.exit(f"unknown setting '{key}'; there are {', '.join(out)}")
        out[key] = value
    return out


def main():
    cfg = settings()
    shape, tokens, r = SHAPES[cfg["shape"]], int(cfg["tokens"]), int(cfg["r"])
    layers, channels, heads, kv_heads, hidden = shape
    parts = layout(channels, heads, kv_heads, hidden)
    size = sum(torch.Size(s).numel() for _, s in parts)
    torch.manual_seed(1)
    host = [(torch.randn(size) * 0.02).to(torch.bfloat16).pin_memory() for _ in range(layers)]
    for b in host:
        for name, w in views(b, parts).items():
            if "norm" in name:
                w.fill_(1)
    lowest = layers - max(1, int(layers * float(cfg["top_fraction"]) + 0.5))
    masters, flat = {}, []
    for i in range(lowest, layers):
        masters[i] = {}
        for name, (out, inn) in [(n, s) for n, s in parts if n in ("q", "k", "v", "o")]:
            a = (torch.randn(r, inn, device="cuda") / inn ** 0.5).requires_grad_()
            b = torch.zeros(out, r, device="cuda").requires_grad_()
            masters[i][name] = (a, b)
            flat += [a, b]
    optimizer = torch.optim.AdamW(flat, lr=1e-5, weight_decay=0, fused=True)
    angle = torch.outer(torch.arange(tokens), 1e6 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
    cos, sin = angle.cos().to("cuda", torch.bfloat16), angle.sin().to("cuda", torch.bfloat16)
    x0 = torch.randn(tokens, channels, device="cuda").to(torch.bfloat16)
    stream = Stream(host, parts, list(range(layers)) + list(range(layers - 1, lowest - 1, -1)))

    def step():
        copies = [p.detach().to(torch.bfloat16).requires_grad_() for p in flat]
        adapters = {i: {} for i in range(layers)}
        for at, (i, name) in enumerate((i, n) for i in range(lowest, layers) for n in ("q", "k", "v", "o")):
            adapters[i][name] = (copies[2 * at], copies[2 * at + 1], 16.0 / r)
        x, inputs = x0, []
        with torch.no_grad():
            for i in range(layers):
                inputs.append(x)
                x = stream.visit(lambda w: block(x, w, adapters[i] or None, shape, cos, sin))
        grad = x / x.numel()
        for i in range(layers - 1, lowest - 1, -1):
            def backward(w):
                leaf = inputs[i].detach().requires_grad_()
                block(leaf, w, adapters[i], shape, cos, sin).backward(grad)
                return leaf.grad
            grad = stream.visit(backward)
        for p, c in zip(flat, copies):
            p.grad = c.grad.float()
        torch.nn.utils.clip_grad_norm_(flat, 1.0, foreach=True)
        optimizer.step()

    samples = []
    for i in range(int(cfg["steps"]) + 3): # three that are not measured
        before, t0 = stream.bytes, time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - t0)
        moved = stream.bytes - before
    samples = samples[3:]
    result = {"settings": cfg, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(),
              "median": statistics.median(samples), "min": min(samples), "samples": samples, "link": moved,
              "peak": torch.cuda.max_memory_allocated(), "visits": len(stream.order)}
    print(f"torch {torch.__version__} streamed {cfg['shape']} T={tokens}: median {result['median'] * 1e3:.2f} ms, "
          f"least {result['min'] * 1e3:.2f}; {len(stream.order)} visits, link {moved / 1e9:.3f} GB, "
          f"peak {result['peak'] / 2 ** 30:.3f} GiB")
    if cfg["json"]:
        with open(cfg["json"], "w") as f:
            json.dump(result, f)


if __name__ == "__main__":
    main()
