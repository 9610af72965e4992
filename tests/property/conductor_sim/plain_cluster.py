"""The modelled cluster in plain Python, one decode step at a time: the oracle of its kernels."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from moonpool.conductor.settings import ClusterSettings


@dataclass
class PlainRequest:
    """One request and what became of it; times in seconds."""

    arrival: float
    tokens: int
    output: int
    blocks: list[int]
    prefill: int
    decode: int
    cached: int = 0
    done: int = 0
    started: bool = False
    stream_end: float = 0.0
    load_end: float = 0.0
    ready: float = 0.0
    first_token: float = 0.0
    produced: int = 1
    intervals: list[float] = field(default_factory=list)
    last_token: float = 0.0
    finish: float | None = None
    refused: bool = False


@dataclass
class PlainInstance:
    """One instance; `now` is when its step in flight ends."""

    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: deque[PlainRequest] = field(default_factory=deque)
    joins: list[PlainRequest] = field(default_factory=list)
    running: list[PlainRequest] = field(default_factory=list)
    now: float = 0.0
    stepping: bool = False
    chunk: int = 0
    sender_free: float = 0.0
    receiver_free: float = 0.0
    output_blocks: int = 0


class PlainCluster:
    """Serves requests whose placement is fixed; `run` until all have ended."""

    def __init__(self, settings: ClusterSettings, refuse_above: float = float("inf")) -> None:
        self.settings = settings
        self.refuse_above = refuse_above
        count = settings.aggregated or settings.prefill + settings.decode
        self.instances = [PlainInstance() for _ in range(count)]

    def run(self, requests: list[PlainRequest]) -> None:
        for request in requests:
            self.advance(request.arrival)
            instance = self.instances[request.prefill]
            instance.now = max(instance.now, request.arrival)
            instance.queue.append(request)
        self.advance(float("inf"))

    def advance(self, until: float) -> None:
        prefills = range(self.settings.prefill)
        while True:
            due = [(self.next_event(at), at) for at in prefills]
            when, at = min(due, default=(float("inf"), -1))
            if when > until or when == float("inf"):
                break
            self.act(at, when, until)
        for at in range(self.settings.prefill, len(self.instances)):
            while (when := self.next_event(at)) <= until and when < float("inf"):
                self.act(at, when, until)

    def next_event(self, at: int) -> float:
        me = self.instances[at]
        if me.stepping:
            return me.now
        wakes = [max(me.now, me.joins[0].ready)] if me.joins else []
        wakes += [me.now] if me.queue else []
        return min(wakes, default=float("inf"))

    def act(self, at: int, when: float, until: float) -> None:
        me = self.instances[at]
        if me.stepping:
            self.end_step(at)
        else:
            me.now = when
        self.start_step(at)

    def start_step(self, at: int) -> None:
        me, settings = self.instances[at], self.settings
        if at >= settings.prefill:
            self.take_joins(me)
        me.chunk = self.chunk(at) if me.queue else 0
        if not me.chunk and not me.running:
            return
        took = 0.0
        if me.running:
            context = sum(each.tokens + each.produced for each in me.running)
            took = settings.decode_cost.step_seconds(float(len(me.running)), float(context))
        if me.chunk:
            head = me.queue[0]
            after = head.done + me.chunk
            cost = settings.prefill_cost
            took += cost.quadratic_s * (after**2 - head.done**2) + cost.linear_s * me.chunk
            if after >= head.tokens:
                took = max(took, head.load_end - me.now)
        me.stepping = True
        me.now += took

    def chunk(self, at: int) -> int:
        me, settings = self.instances[at], self.settings
        head = me.queue[0]
        if not head.started:
            if head.decode == at and me.running:
                held = sum(each.tokens + each.output for each in me.running)
                room = settings.cache_blocks * settings.block_tokens
                if held + head.tokens + head.output > min(room, settings.kv_tokens_max):
                    return 0
                if len(me.running) >= settings.batch_max:
                    return 0
            self.start_prefill(at, head)
        left = head.tokens - head.done
        return min(left, settings.prefill_chunk_tokens) if settings.prefill_chunk_tokens else left

    def start_prefill(self, at: int, head: PlainRequest) -> None:
        me, settings = self.instances[at], self.settings
        head.started = True
        for block in head.blocks:
            if block not in me.cache:
                break
            head.cached += 1
        head.done = min(head.cached * settings.block_tokens, head.tokens - 1)
        size = settings.model.token_bytes
        host = head.cached * settings.block_tokens * size / settings.host_load_bytes_per_s
        head.load_end = me.now + host
        if head.decode != at:
            target = self.instances[head.decode]
            begin = max(me.now, me.sender_free, target.receiver_free)
            end = begin + head.tokens * size / settings.link_bytes_per_s
            me.sender_free = target.receiver_free = end
            head.stream_end = end + settings.link_latency_s
        else:
            me.output_blocks += -(-head.output // settings.block_tokens)

    def end_step(self, at: int) -> None:
        me = self.instances[at]
        me.stepping = False
        for each in list(me.running):
            each.produced += 1
            each.intervals.append(me.now - each.last_token)
            each.last_token = me.now
            if each.produced >= each.output:
                self.leave(me, each, at)
        if me.chunk:
            head = me.queue[0]
            head.done += me.chunk
            if head.done >= head.tokens:
                self.end_prefill(at, me.queue.popleft())

    def leave(self, me: PlainInstance, request: PlainRequest, at: int) -> None:
        if request in me.running:
            me.running.remove(request)
        request.finish = me.now
        if request.prefill == at:
            me.output_blocks -= -(-request.output // self.settings.block_tokens)

    def end_prefill(self, at: int, request: PlainRequest) -> None:
        me, settings = self.instances[at], self.settings
        request.first_token = request.last_token = me.now
        for block in reversed(request.blocks):
            me.cache.pop(block, None)
            me.cache[block] = None
        room = settings.cache_blocks - (me.output_blocks if settings.aggregated else 0)
        while len(me.cache) > max(room, 0):
            me.cache.popitem(last=False)
        if request.decode != at:
            request.ready = max(me.now + settings.link_latency_s, request.stream_end)
            joins = self.instances[request.decode].joins
            joins.append(request)
            joins.sort(key=lambda each: each.ready)
        elif request.output > 1:
            me.running.append(request)
        else:
            self.leave(me, request, at)

    def take_joins(self, me: PlainInstance) -> None:
        settings = self.settings
        while me.joins and me.joins[0].ready <= me.now and len(me.running) < settings.batch_max:
            request = me.joins[0]
            held = sum(each.tokens + each.output for each in me.running)
            if me.running and held + request.tokens + request.output > settings.kv_tokens_max:
                return
            me.joins.pop(0)
            context = sum(each.tokens + each.produced for each in me.running) + request.tokens
            step = settings.decode_cost.step_seconds(float(len(me.running) + 1), float(context))
            if step > self.refuse_above:
                request.refused = True
            elif request.output <= 1:
                request.finish = me.now
            else:
                me.running.append(request)


def mean_of_longest_tenth(intervals: list[float]) -> float:
    """As FAST'25 defines a request's TBT."""
    number = -(-len(intervals) // 10)
    return sum(sorted(intervals, reverse=True)[:number]) / number
