"""vLLM's v1 scheduler alone, in process and without a model: schedule() + update_from_output(). Runs in a virtual
environment of its own (`make bench-scheduler` makes it). Prints one JSON object.

As in production: prefix caching with SHA-256, gc enabled with the heap frozen after start, asserts on, no statistics.
Building and hashing a request is not in its times, as it is done by another thread there; `with_add_ms` has it.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

import torch
from summary import summary  # beside this script
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config import set_current_vllm_config
from vllm.envs import enable_envs_cache
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT, SHARED, BLOCK_SIZE, MAX_TOKENS, MAX_LEN = 128, 64, 16, 4000, 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
HASHER = get_request_block_hasher(BLOCK_SIZE, HASH)
RNG = random.Random(0)


def make_scheduler(max_num_seqs, num_blocks=131_072):
    folder = tempfile.mkdtemp(prefix="orca-vllm-")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(CONFIG, file)
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_LEN, seed=0
    )
    scheduling = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=MAX_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    cache = CacheConfig(
        block_size=BLOCK_SIZE, cache_dtype="auto", enable_prefix_caching=True, prefix_caching_hash_algo="sha256"
    )
    config = VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with set_current_vllm_config(config):
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=False,
        )
    # Plans for model runner V2, a GPU's default, and the cheaper for the scheduler (refused here without Triton).
    scheduler.use_v2_model_runner = True
    enable_envs_cache()
    freeze_gc_heap()
    return scheduler


class Bench:
    def __init__(self, max_num_seqs):
        self.scheduler = make_scheduler(max_num_seqs)
        self.arrivals = 0

    def request(self, head=(), max_tokens=MAX_TOKENS):
        self.arrivals += 1
        wire = EngineCoreRequest(
            request_id=f"cmpl-{self.arrivals:032x}-0",
            prompt_token_ids=[*head, *(RNG.randrange(3, 32_000) for _ in range(PROMPT - len(head)))],
            mm_features=None,
            pooling_params=None,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return Request.from_engine_core_request(wire, HASHER)

    def step(self):
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[RNG.randrange(3, 32_000)] for _ in ids],
        )
        answered = time.perf_counter()
        self.scheduler.update_from_output(plan, result)
        return planned - started, time.perf_counter() - answered, plan

    def fill(self, sequences):
        made = []
        for _ in range(BLOCK_SIZE):
            for _ in range(sequences // BLOCK_SIZE):
                made.append(self.request())
                self.scheduler.add_request(made[-1])
            self.step()
        assert len(self.scheduler.running) == sequences
        return made


def steady(steps, sequences=256, waiting=0):
    bench = Bench(sequences)
    bench.fill(sequences)
    for _ in range(waiting):
        bench.scheduler.add_request(bench.request())
    times = []
    for _ in range(steps):
        schedule, update, plan = bench.step()
        assert len(plan.num_scheduled_tokens) == sequences
        times.append((schedule, update))
    return summary(times, sequences)


def mixed(steps, sequences=256, new=32):
    bench = Bench(sequences + new)
    heads = [request.prompt_token_ids[:SHARED] for request in bench.fill(sequences)]
    times, adding = [], []
    for _ in range(steps):
        started = time.perf_counter()
        for _ in range(new):
            bench.scheduler.add_request(bench.request(RNG.choice(heads), max_tokens=1))
        adding.append(time.perf_counter() - started)
        schedule, update, plan = bench.step()
        assert sum(one.num_computed_tokens for one in plan.scheduled_new_reqs) == new * SHARED
        times.append((schedule, update))
    with_add = statistics.median(sum(pair) + add for pair, add in zip(times, adding, strict=True)) * 1e3
    return summary(times, sequences + new) | {"with_add_ms": with_add}


CASES = {
    "steady": steady,
    "waiting": lambda steps: steady(steps, waiting=10_000),
    "mixed": mixed,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print(json.dumps(CASES[arguments.case](arguments.steps)))
