# SPDX-License-Identifier: Apache-2.0
"""What users of the final generation's client see, with its habits.

Config classes refuse unknown fields, one part of the config must be of its own class, ops block
whoever awaits them over Ray, errors over HTTP lose the server's words, a client that was attached
over HTTP ends the jobs of others.
"""

import asyncio
from dataclasses import dataclass

import aiohttp

import arctic_servers
from arctic_rl_c import wire
from arctic_servers import Config

ORDER = ("sampling", "log_prob", "training")


class OnPremConfig(Config):
    FORBID = True
    FIELDS = {
        "type": "onprem",
        "protocol": "http",
        "host": "localhost",
        "port": 8000,
        "colocate": False,
        "launch_local_server": False,
        "server_cuda_visible_devices": None,
        "startup_timeout": 600.0,
    }


class TrainingConfig(Config):
    FORBID = True
    FIELDS = {
        "full_determinism": False,
        "checkpoint_path": None,
        "ds_config": None,
        "ds_worker_config": None,
        "cuda_ipc": False,
        "low_memory": False,
    }


class SamplingConfig(Config):
    FORBID = True
    FIELDS = {
        "vllm": dict,
        "arctic_inference_config": None,
        "log_prob_engine": "vllm",
        "log_prob_ds_config": None,
    }


class ArcticRLClientConfig(Config):
    FORBID = True
    FIELDS = {
        "model_name": Config.REQUIRED,
        "seed": None,
        "dtype": None,
        "max_seq_len": 8192,
        "training_gpus": 0,
        "sampling_gpus": 0,
        "log_prob_gpus": 0,
        "job_ready_timeout": 1800.0,
        "request_timeout": 1800.0,
        "training": TrainingConfig,
        "sampling": SamplingConfig,
        "backend": OnPremConfig,
        "training_job_id": None,
        "sampling_job_id": None,
        "log_prob_job_id": None,
    }

    def __init__(self, **given):
        super().__init__(**given)
        if not isinstance(self.backend, OnPremConfig):
            raise arctic_servers.RefusedConfigError([("backend", "no tag to tell its kind by")])


@dataclass
class JobHandles:
    training: object = None
    sampling: object = None
    log_prob: object = None

    def require(self, job):
        if getattr(self, job) is None:
            raise ValueError(f"No {job} job initialized.")
        return getattr(self, job)


class _Transport:
    def __init__(self, config):
        self.config, self.jobs = config, JobHandles()

    def initialize(self):
        config = self.config
        ids = {job: getattr(config, f"{job}_job_id") for job in ORDER}
        if any(number is not None for number in ids.values()):
            self.jobs = JobHandles(**ids)
            return self.jobs
        for job in ORDER:
            if getattr(config, f"{job}_gpus") > 0:
                setattr(self.jobs, job, self.create({"job_type": job}))
        return self.jobs

    def end_jobs(self):
        for job in ("training", "sampling", "log_prob"):
            if getattr(self.jobs, job) is not None:
                self.destroy(getattr(self.jobs, job), job)
        self.jobs = JobHandles()

    async def aclose(self):
        pass


class RayTransport(_Transport):
    def __init__(self, config, server_state):
        super().__init__(config)
        self.attached = server_state is not None
        self.state = server_state or arctic_servers.Server(
            training=config.training_gpus, colocate=config.backend.colocate
        )
        self.loop = asyncio.new_event_loop()

    def create(self, payload):
        return self.state.initialize(payload)

    def destroy(self, number, job):
        self.state.destroy(number)

    def get_server_state(self):
        return self.state

    def shutdown(self):
        if not self.attached:
            self.end_jobs()
        self.loop.close()

    async def acall(self, op, number, body):
        state, backend = self.state, self.state.backend
        if op == "generate":
            return {"results": await state.generate(number, body)}
        state.check(number, "sampling" if "inference" in op else "training", "log_prob", "sampling")
        if op == "operation":
            if body["operation_type"] == "reset-prefix-cache":
                return await backend.reset_prefix_cache()
            flags = {k: v for k, v in body["payload"].items() if k in ("cuda_ipc", "low_memory")}
            return await backend.sync_weights(**flags)
        if op == "forward":
            reference = state.jobs[number] == "log_prob"
            return await backend.fwd_no_grad(body, reference_model=reference)
        if op == "wake-inference":
            return await backend.wake_inference(body)
        if op == "sleep-inference":
            return await backend.sleep_inference(body["level"])
        if op == "step":
            return await backend.step()
        if op == "forward-backward":
            return await backend.fwd_bwd(body)
        if op == "save":
            return await backend.save_checkpoint(**body)
        return await backend.load_checkpoint(**body)


class HttpTransport(_Transport):
    """Creates and ends jobs through the doubles' server, and sends ops over real HTTP."""

    def __init__(self, config):
        super().__init__(config)
        self.base_url = f"http://{config.backend.host}:{config.backend.port}"
        self.timeout = config.request_timeout
        self._asession = None
        self._asession_loop = None
        self.proc = None
        self.state = arctic_servers.SERVERS[-1]

    def create(self, payload):
        return self.state.initialize(payload)

    def destroy(self, number, job):
        self.state.destroy(number)

    def shutdown(self):
        self.end_jobs()

    async def aclose(self):
        if self._asession is not None and self._asession_loop is asyncio.get_running_loop():
            await self._asession.close()
        self._asession = self._asession_loop = None

    async def acall(self, op, number, body):
        if self._asession is None or self._asession_loop is not asyncio.get_running_loop():
            self._asession = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.timeout)
            )
            self._asession_loop = asyncio.get_running_loop()
        framed = op in ("forward", "forward-backward", "generate")
        sent = {"data": wire.dumps(body)} if framed else {"json": body}
        if framed:
            sent["headers"] = {"Content-Type": "application/octet-stream"}
        url, params = f"{self.base_url}/{op}", {"job_id": number}
        async with self._asession.post(url, params=params, **sent) as response:
            response.raise_for_status()
            if response.content_type == "application/octet-stream":
                return wire.loads(await response.read())
            return await response.json()


class ArcticRLClient:
    def __init__(self, config, server_state=None):
        self.config = config
        over_ray = config.backend.protocol == "ray"
        if not over_ray and server_state is not None:
            raise ValueError("server_state is for Ray")
        self.transport = RayTransport(config, server_state) if over_ray else HttpTransport(config)
        self.jobs = self.transport.initialize()

    async def fwd_bwd(self, batch, processing=None, router_replay=None):
        number = self.jobs.require("training")
        return await self.transport.acall("forward-backward", number, dict(batch))

    async def fwd_no_grad(self, batch, reference_model=False):
        number = self.jobs.require("log_prob" if reference_model else "training")
        return await self.transport.acall("forward", number, dict(batch))

    async def step(self, learning_rate=None):
        body = {"learning_rate": learning_rate}
        return await self.transport.acall("step", self.jobs.require("training"), body)

    async def save_checkpoint(
        self,
        checkpoint_id=None,
        checkpoint_type="resumable",
        path=None,
        *,
        step=None,
        export_hf=False,
        save_total_limit=None,
        stage_info=None,
    ):
        body = {"path": path, "step": step, "save_total_limit": save_total_limit}
        return await self.transport.acall("save", self.jobs.require("training"), body)

    async def load_checkpoint(self, path=None, *, step=None):
        body = {"path": path, "step": step}
        return await self.transport.acall("load-checkpoint", self.jobs.require("training"), body)

    async def generate(self, prompts, sampling_params=None, routing_key=None, strict=False):
        body = {
            "prompts": prompts,
            "sampling_params": sampling_params,
            "routing_key": routing_key,
            "strict": strict,
        }
        number = self.jobs.require("sampling")
        return (await self.transport.acall("generate", number, body))["results"]

    async def sync_weights(self, cuda_ipc=None, low_memory=None):
        training, sampling = self.jobs.require("training"), self.jobs.require("sampling")
        payload = {"source_sub_job_id": training, "target_sub_job_ids": [sampling]}
        flags = {"cuda_ipc": cuda_ipc, "low_memory": low_memory}
        payload |= {key: value for key, value in flags.items() if value is not None}
        body = {"operation_type": "weight-sync", "payload": payload}
        call = self.transport.acall
        await call("wake-inference", sampling, ["weights"])
        done = await call("operation", training, body)
        await call("wake-inference", sampling, ["kv_cache"])
        await call("operation", sampling, {"operation_type": "reset-prefix-cache"})
        return done

    async def reset_prefix_cache(self, drain=True, timeout_s=60.0, retry_interval_s=0.1):
        body = {"operation_type": "reset-prefix-cache", "payload": {"drain": drain}}
        return await self.transport.acall("operation", self.jobs.require("sampling"), body)

    async def sleep_inference(self, level=1):
        number = self.jobs.require("sampling")
        return await self.transport.acall("sleep-inference", number, {"level": level})

    async def wake_inference(self, tags=None):
        return await self.transport.acall("wake-inference", self.jobs.require("sampling"), tags)

    def reconnect_config(self):
        ids = {f"{job}_job_id": getattr(self.jobs, job) for job in ORDER}
        return ArcticRLClientConfig(**{**dict(self.config), **ids})

    def get_server_state(self):
        state = getattr(self.transport, "get_server_state", None)
        if state is None:
            raise NotImplementedError("no server state to share")
        return state()

    async def shutdown(self):
        await self.transport.aclose()
        self.transport.shutdown()


def create_arctic_rl_client(config, *, blocking_calls=False, server_state=None):
    return ArcticRLClient(config, server_state=server_state)
