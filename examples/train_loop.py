# SPDX-License-Identifier: Apache-2.0
"""GRPO without verl: a client, the embedded server, and a loop."""

import asyncio

from arctic_rl_c import ArcticRLClient, load_config
from arctic_rl_c.local.grpo import group_advantages, make_data, response_log_probs
from arctic_rl_c.local.model import build_tokenizer
from arctic_rl_c.local.tasks import Arithmetic
from arctic_rl_c.transports.local import LocalTransport

CONFIG = """
remote_backend: {weight_sync: {cuda_ipc: false}, train: {zorro_train: {enable: false}}}
actor_rollout_ref:
  model: {path: "random:tiny", enable_gradient_checkpointing: false}
  actor: {ppo_mini_batch_size: 8, optim: {lr: 4e-3, weight_decay: 0.0}}
  rollout: {n: 16, temperature: 1.0}
data: {train_batch_size: 128, max_prompt_length: 8, max_response_length: 4}
"""
ACTOR = {"entropy_coeff": 0.02, "loss_agg_mode": "token-mean", "rollout_n": 16}


async def main(steps: int = 20) -> None:
    """Train for some steps and print the mean reward of each."""
    config = load_config(CONFIG)
    task, tokenizer = Arithmetic(), build_tokenizer()
    n = config["actor_rollout_ref"]["rollout"]["n"]
    pad = tokenizer.pad_token_id
    form = {"prompt_width": 8, "response_width": 4, "pad_token_id": pad, "temperature": 1.0}
    common = {"pad_token_id": pad, "rollout_n": n}
    async with LocalTransport(config) as transport:
        client = ArcticRLClient(transport, config)
        await client.sync_weights()
        for step in range(1, steps + 1):
            problems = [p for p in task.sample(128) for _ in range(n)]
            prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
            results = await client.generate(prompts, {"temperature": 1.0, "max_tokens": 4})
            rewards = [
                task.reward(p, r["text"], r["finish_reason"] == "stop")
                for p, r in zip(problems, results, strict=True)
            ]
            data = make_data(prompts, [r["token_ids"] for r in results], **form)
            out = await client.compute_log_prob(data, **common)
            data["old_log_probs"] = response_log_probs(
                out["model_output"]["log_probs"], data["response_mask"], aligned=False
            )
            data["advantages"] = group_advantages(rewards, n)[:, None] * data["response_mask"]
            update = await client.update_actor(data, actor_config=ACTOR, **common)
            await client.sync_weights()
            print(
                f"step {step:3d}  reward {sum(rewards) / len(rewards):.3f}  "
                f"loss {update['loss']:+.4f}  grad_norm {update['metrics']['grad_norm']:.3f}"
            )


if __name__ == "__main__":
    asyncio.run(main())
