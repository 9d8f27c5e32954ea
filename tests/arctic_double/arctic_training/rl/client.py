# SPDX-License-Identifier: Apache-2.0
"""The first generation's clients, with their habits.

Flags of a sync go with each call, a routing key is known over Ray alone, there is no resuming, a
checkpoint takes no options, any client ends the jobs that it knows when it is shut down, and
`shutdown` is a coroutine function over Ray and a plain one over HTTP.
"""

import arctic_servers
from arctic_servers import Config


class ArcticRLClientConfig(Config):
    FIELDS = {
        "backend": "local",
        "comm_protocol": "http",
        "checkpoint_path": None,
        "host": None,
        "port": None,
        "model_name": Config.REQUIRED,
        "ds_config": dict,
        "training_config": None,
        "vllm_config": None,
        "log_prob_ds_config": None,
        "ds_worker_config": None,
        "use_arctic_inference": False,
        "full_determinism": False,
        "seed": 42,
        "training_gpus": 0,
        "sampling_gpus": 0,
        "log_prob_gpus": 0,
        "log_prob_engine": "vllm",
        "colocate": False,
        "training_job_id": None,
        "sampling_job_id": None,
        "log_prob_job_id": None,
    }

    def __init__(self, **given):
        super().__init__(**given)
        if self.backend == "local" and self.training_job_id is None and self.training_gpus <= 0:
            raise ValueError("Local backend requires training_gpus > 0.")


class _Client:
    ORDER = ("training", "sampling", "log_prob")

    def __init__(self, config, state):
        self.config, self.state = config, state
        self.ids = {job: getattr(config, f"{job}_job_id") for job in self.ORDER}
        if config.training_job_id is not None:
            return
        for job in self.ORDER:
            if job != "log_prob" or config.log_prob_gpus > 0:
                self.ids[job] = state.initialize({"job_type": job})

    @property
    def training_job_id(self):
        if self.ids["training"] is None:
            raise ValueError("No training job initialized.")
        return self.ids["training"]

    async def fwd_bwd(self, batch, processing=None):
        self.state.check(self.training_job_id, "training")
        return await self.state.backend.fwd_bwd(batch)

    async def fwd_no_grad(self, batch, reference_model):
        number = self.ids["log_prob" if reference_model else "training"]
        if number not in self.state.jobs:
            raise KeyError(number)
        return await self.state.backend.fwd_no_grad(batch, reference_model=reference_model)

    async def step(self):
        self.state.check(self.training_job_id, "training")
        return await self.state.backend.step()

    async def save_checkpoint(self):
        return await self.state.backend.save_checkpoint()

    async def sleep_inference(self, level=1):
        return await self.state.backend.sleep_inference(level)

    async def wake_inference(self, tags=None):
        return await self.state.backend.wake_inference(tags)

    async def reset_prefix_cache(self):
        return await self.state.backend.reset_prefix_cache()

    def get_server_state(self):
        return self.state

    def _end(self):
        for job in ("training", "sampling", "log_prob"):
            if self.ids[job] is not None:
                self.state.destroy(self.ids[job])
                self.ids[job] = None


class ArcticRLRayClient(_Client):
    def __init__(self, config, state):
        super().__init__(config, state or arctic_servers.Server(colocate=config.colocate))

    async def generate(self, prompts, sampling_params=None, routing_key=None):
        body = {
            "prompts": prompts,
            "sampling_params": sampling_params,
            "routing_key": routing_key,
            "strict": routing_key is not None,
        }
        return await self.state.generate(self.ids["sampling"], body)

    async def sync_weights(self, cuda_ipc=False, low_memory=False):
        return await self.state.backend.sync_weights(cuda_ipc=cuda_ipc, low_memory=low_memory)

    def reconnect_config(self):
        return ArcticRLClientConfig(
            backend="local",
            model_name=self.config.model_name,
            comm_protocol="ray",
            **{f"{job}_job_id": number for job, number in self.ids.items()},
        )

    async def shutdown(self):
        self._end()


class ArcticRLHTTPClient(_Client):
    ORDER = ("sampling", "log_prob", "training")

    def __init__(self, config):
        self._session = arctic_servers.Session()
        super().__init__(config, arctic_servers.SERVERS[-1])

    async def generate(self, prompts, sampling_params=None):
        body = {"prompts": prompts, "sampling_params": sampling_params}
        return await self.state.generate(self.ids["sampling"], body)

    async def sync_weights(self, cuda_ipc=False, low_memory=False):
        backend = self.state.backend
        await backend.wake_inference(["weights"])
        done = await backend.sync_weights(cuda_ipc=cuda_ipc, low_memory=low_memory)
        await backend.wake_inference(["kv_cache"])
        await backend.reset_prefix_cache()
        return done

    def reconnect_config(self):
        return ArcticRLClientConfig(
            host=self.config.host,
            port=self.config.port,
            backend="dss-platform",
            model_name=self.config.model_name,
            comm_protocol="http",
            **{f"{job}_job_id": number for job, number in self.ids.items()},
        )

    def shutdown(self):
        self._end()


def create_arctic_rl_client(config, server_state=None):
    if config.comm_protocol == "http":
        return ArcticRLHTTPClient(config)
    if config.comm_protocol == "ray":
        return ArcticRLRayClient(config, server_state)
    raise ValueError(f"Invalid communication protocol: {config.comm_protocol}")
