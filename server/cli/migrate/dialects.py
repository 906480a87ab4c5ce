"""Flags of other servers and ours: one table per dialect, and the address and the images of each server.

A row has their flags or variables, our flags, and a sentence, with ` | ` between them. An indented line continues its
row. After the names is the value that the row is for: `{x}` is any value, `{x},…` a list with commas, `{x}…` all values
up to the next flag, and `a|b` one of these values; `rows.py` lists placeholders for some values only. Names without a
value are switches; a value without a name is the first word that follows no flag. The first row that fits is used.
Instead of our flags there is `the same`, `not needed` or `no equivalent`; after `partly`, the sentence describes the
part without an equivalent.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    title: str
    table: str
    image: str  # pattern of the names of its container images
    host: str  # its default address
    port: int
    address_note: str
    commands: dict[str, str]  # that start it -> a note on the command
    prefix: str = ""  # of its variables; those without a row are reported
    flag_prefix: str | None = None  # of variables that have the name of a flag
    image_port: int = 0  # the default port in a container, if it is another


_VLLM = """
{model} | MODEL {model}
-q --quantization awq|gptq|awq_marlin|gptq_marlin|compressed-tensors|fp8|bitsandbytes|gguf | not needed | quantized
  checkpoints are recognized by their files.
--kv-cache-memory-bytes {count} | --kv-cache-memory {count}
--kv-cache-memory-bytes {size} | --kv-cache-memory {size}
--model-impl vllm | --model-impl oarlock
--trust-remote-code | --trust-remote-code | leave it out if Oarlock or transformers has the model's class.
VLLM_API_KEY {key} | OARLOCK_API_KEY={key}
VLLM_LOGGING_LEVEL {level} | --log-level {level}
VLLM_LOGGING_LEVEL {x} | --log-level {x}
VLLM_USE_V1 {x} | not needed | there is one engine.
VLLM_WORKER_MULTIPROC_METHOD {x} | not needed | each rank is a process.
VLLM_ATTENTION_BACKEND {x} | not needed | --attention-backend selects the attention kernels.
VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK {x} | not needed | no usage data is sent.
VLLM_ALLOW_LONG_MAX_MODEL_LEN {x} | no equivalent | a context longer than the model was trained for is refused.
VLLM_ALLOW_RUNTIME_LORA_UPDATING {off} | not needed
VLLM_ALLOW_RUNTIME_LORA_UPDATING {x} | no equivalent | the key of --admin-api-key may load adapters of --lora-dir and of
  the hub.
VLLM_PLUGINS lora_filesystem_resolver | not needed | --lora-dir names the directory of the adapters.
VLLM_LORA_RESOLVER_CACHE_DIR VLLM_PLUGIN_LORA_CACHE_DIR {dir} | --lora-dir {dir}
VLLM_USE_MODELSCOPE {x} | no equivalent | models come from the Hugging Face hub or from a directory.
"""
_LLAMA_SERVER = """
-m --model {file} | MODEL {file}
-hf -hfr --hf-repo {repo}:{form} | partly MODEL {repo} | GGUF files are not downloaded: give the path of a {form} file.
-hf -hfr --hf-repo {repo} | partly MODEL {repo} | GGUF files are not downloaded: give the path of a file.
-hff --hf-file {file} | not needed | download {file}, and give its path.
-hft --hf-token {token} | HF_TOKEN={token}
-mu --model-url -dr --docker-repo {x} | no equivalent | GGUF files are not downloaded: give the path of a file.
-c --ctx-size 0 -np --parallel LLAMA_ARG_N_PARALLEL -1 -t --threads -1 -s --seed -1 | not needed
-ctk --cache-type-k f16|bf16|f32 | not needed
-c --ctx-size {n} | --max-model-len {n}
-np --parallel LLAMA_ARG_N_PARALLEL {n} | --max-num-seqs {n}
-b --batch-size LLAMA_ARG_BATCH {n} | --max-num-batched-tokens {n}
-t --threads {n} | --num-threads {n}
-ngl --gpu-layers --n-gpu-layers 0 | --device cpu
-ngl --gpu-layers --n-gpu-layers {n} | not needed | all layers are on the GPU if there is one, or use --device cpu.
-ctk --cache-type-k q8_0 | --kv-cache-dtype int8
-ctk --cache-type-k {type} | --kv-cache-dtype {type}
-ctv --cache-type-v {type} | not needed | values have the type of the keys.
-s --seed {n} | --seed {n}
-a --alias {name},… | --served-model-name {name}
--host {x}.sock | --uds {x}.sock
--host {first},{others} | partly --host {first} | the server listens on one address; 0.0.0.0 is all of them.
--host --port --api-key-file {x} --offline | the same
--api-key LLAMA_API_KEY {key},… | --api-key {key}
--ssl-key-file {file} | --ssl-keyfile {file}
--ssl-cert-file {file} | --ssl-certfile {file}
--cors-origins {origin},… | --allowed-origins {origin}
--api-prefix {x} | --root-path {x}
--chat-template-file {file} | --chat-template {file}
-to --timeout {s} | --request-timeout {s}
--embedding --embeddings | --runner pooling
--no-webui --no-ui | --no-web-page
--no-cache-prompt | --no-enable-prefix-caching
--check-tensors | --check-weights
-lv --verbosity --log-verbosity 0|1 | --log-level error
-lv --verbosity --log-verbosity 2 | --log-level warning
-lv --verbosity --log-verbosity 3 | --log-level info
-lv --verbosity --log-verbosity 4|5 -v --verbose --log-verbose | --log-level debug
--log-jsonl | --log-format json
--rerank --reranking | not needed | rerankers are recognized by their files.
--webui --ui | not needed | there is a page at / without --no-web-page.
-ub --ubatch-size LLAMA_ARG_UBATCH {n} | not needed | --max-num-batched-tokens limits a step.
-tb --threads-batch {n} | not needed | --threads also sets the threads for prompts.
--threads-http {n} | not needed | one process serves HTTP.
-fa --flash-attn {x} | not needed | attention scores are never stored.
-cb --cont-batching | not needed | batching is always continuous.
-kvu --kv-unified | not needed | all requests share one pool of KV blocks.
--jinja | not needed | the checkpoint's chat template is always used.
--metrics LLAMA_ARG_ENDPOINT_METRICS | not needed | GET /metrics is always there.
--slots | not needed | GET /v1/state lists running requests.
--no-slots | not needed | GET /v1/state lists running requests; --admin-api-key protects it.
-lm --load-mode {x} --mlock --mmap --no-mmap | not needed | each rank copies its weights into memory.
--numa {x} | not needed | --cpu-affinity binds ranks to CPUs.
--cache-reuse -cram --cache-ram {n} --cache-prompt | not needed | prefixes are cached for all requests.
--reasoning-format {x} | not needed | reasoning is recognized by the markers in the chat template.
--no-context-shift | not needed | a response ends when the context is full.
--warmup --no-warmup | not needed | steps are always measured at startup.
--log-colors {x} | not needed | the log has no colors.
--log-timestamps --log-prefix | not needed | every line of the log has a timestamp.
--no-mmproj | not needed | models take text only.
-fit --fit -fitt --fit-target -fitc --fit-ctx {x} | not needed | the memory for the KV cache is measured.
-n --predict --n-predict {n} | not needed | requests set max_tokens.
-sm --split-mode -ts --tensor-split {x} | no equivalent | --tensor-parallel-size splits a model into equal parts.
-dev --device -mg --main-gpu {x} | no equivalent | all ranks have one kind of device: --device.
-ot --override-tensor -ncmoe --n-cpu-moe {x} -cmoe --cpu-moe | no equivalent | all weights are on one device.
--chat-template {x} | no equivalent | templates are files: --chat-template FILE.
--chat-template-kwargs --reasoning-budget -rea --reasoning --reasoning-effort {x} | no equivalent | use
  chat_template_kwargs.
--temp --temperature --top-k --top-p --min-p --repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty
  --samplers -l --logit-bias {x} | no equivalent | defaults come from generation_config.json.
--grammar --grammar-file -j --json-schema {x} | no equivalent | requests set grammars and schemas.
-md --model-draft --draft --draft-max --draft-min -ngld --gpu-layers-draft --spec-type {x} | no equivalent | use
  --speculative-config.
--lora {adapter_file},… | partly --enable-lora --lora-modules {adapter_file} | a request uses an adapter only if it
  gives the name before = as its model.
--lora-scaled {x} | no equivalent | adapters have the scale of their files: --lora FILE.
--lora-init-without-apply | not needed | only requests with the name of an adapter use it.
--control-vector --control-vector-scaled --control-vector-layer-range {x} | no equivalent | control vectors are not
  supported.
-mm --mmproj --mmproj-url {x} | no equivalent | models take text only.
--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx {x} | no equivalent | the model defines
  the scaling.
--override-kv {x} | no equivalent | the metadata in the file is used unchanged.
--pooling --embd-normalize {x} | no equivalent | the files of the model define the pooling.
--log-file {x} | no equivalent | the log goes to standard error.
--models-dir --models-preset --models-max {x} | no equivalent | one server serves one model.
--slot-save-path {x} | no equivalent | prompts are kept in memory: --kv-offload-path keeps them in files.
--path {x} | no equivalent | static files are not served.
"""
_OLLAMA = """
{hub}/{owner}/{repo}:{form} | partly MODEL {owner}/{repo} | GGUF files are not downloaded: give the path of a {form}
  file.
{hub}/{owner}/{repo} | partly MODEL {owner}/{repo} | GGUF files are not downloaded: give the path of a file.
{name} | no equivalent | Ollama's library is not available: give a GGUF file or a hub id.
{prompt}… | not needed | send it to the server: `oarlock chat` or POST /v1/chat/completions.
OLLAMA_HOST https://{address}:{port} | partly --host {address} --port {port} | set --ssl-certfile and --ssl-keyfile.
OLLAMA_HOST https://{address} | partly --host {address} --port 443 | set --ssl-certfile and --ssl-keyfile.
OLLAMA_HOST http://{address}:{port} OLLAMA_HOST {address}:{port} | --host {address} --port {port}
OLLAMA_HOST http://{address} | --host {address} --port 80
OLLAMA_HOST {address} | --host {address} --port 11434
OLLAMA_ORIGINS {origin},… | --allowed-origins {origin}
OLLAMA_NUM_PARALLEL OLLAMA_CONTEXT_LENGTH 0 OLLAMA_KV_CACHE_TYPE f16 OLLAMA_DEBUG 0|false | not needed
OLLAMA_NUM_PARALLEL {n} | --max-num-seqs {n}
OLLAMA_MAX_QUEUE {n} | --max-waiting-requests {n}
OLLAMA_CONTEXT_LENGTH {n} | --max-model-len {n}
OLLAMA_KV_CACHE_TYPE q8_0 | --kv-cache-dtype int8
OLLAMA_KV_CACHE_TYPE {type} | --kv-cache-dtype {type}
OLLAMA_DEBUG 1|2|true | --log-level debug
--keepalive OLLAMA_KEEP_ALIVE OLLAMA_MAX_LOADED_MODELS OLLAMA_LOAD_TIMEOUT {x} | not needed | a server keeps one model
  loaded.
OLLAMA_FLASH_ATTENTION {x} | not needed | attention scores are never stored.
OLLAMA_MULTIUSER_CACHE {x} | not needed | prefixes are cached for all users.
OLLAMA_NEW_ENGINE OLLAMA_NEW_ESTIMATES {x} | not needed | there is one engine.
OLLAMA_NOPRUNE OLLAMA_NOHISTORY {x} | not needed | nothing is pruned; `oarlock chat --no-history` keeps no history.
OLLAMA_MODELS {x} | no equivalent | Ollama's files are not read: give a GGUF file or a hub id.
OLLAMA_SCHED_SPREAD {x} | no equivalent | --tensor-parallel-size splits a model.
OLLAMA_GPU_OVERHEAD OLLAMA_MAX_VRAM {x} | no equivalent | --gpu-memory-utilization limits the memory.
OLLAMA_LLM_LIBRARY OLLAMA_INTEL_GPU {x} | no equivalent | --device selects the device.
--verbose | not needed | `oarlock chat` shows times with /stats.
--nowordwrap | not needed | a terminal wraps lines itself.
--insecure | not needed | models are downloaded over HTTPS.
--think {x} --hidethinking | no equivalent | requests set chat_template_kwargs or reasoning_effort.
--format {x} | no equivalent | requests set response_format.
--dimensions {x} | no equivalent | embedding requests set dimensions.
"""
_SGLANG = """
--model-path --model {model} {model} | MODEL {model}
--tokenizer-path {x} | --tokenizer {x}
--revision --host --port --admin-api-key --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --nnodes
  --node-rank --dtype --load-format --download-dir --device --log-level --ssl-keyfile --ssl-certfile {x} | the same
--served-model-name --api-key {x}… | the same
--tp --tp-size {n} | --tensor-parallel-size {n}
--pp --pp-size {n} | --pipeline-parallel-size {n}
--dp --dp-size {n} | --data-parallel-size {n}
--dist-init-addr --nccl-init-addr {host}:{n} | --master-addr {host} --master-port {n}
--kv-cache-dtype bf16|bfloat16 --ep --ep-size --expert-parallel-size 0|1 | not needed
--ep --ep-size --expert-parallel-size {number} --enable-ep-moe | --enable-expert-parallel
--context-length {n} | --max-model-len {n}
--max-running-requests {n} | --max-num-seqs {n}
--max-queued-requests {n} | --max-waiting-requests {n}
--chunked-prefill-size {n} | --max-num-batched-tokens {n}
--page-size {n} | --block-size {n}
--mem-fraction-static {x} | --gpu-memory-utilization {x} | ours includes the memory of a step: raise it if there is
  room.
--random-seed {n} | --seed {n}
--chat-template {template} | the same
--chat-template {x} | no equivalent | templates are files; without one the checkpoint's is used.
--tool-call-parser qwen|qwen25 | --tool-call-parser hermes
--tool-call-parser deepseekv{version} | --tool-call-parser deepseek_v{version}
--tool-call-parser glm | --tool-call-parser glm45
--tool-call-parser gpt-oss | --tool-call-parser openai
--tool-call-parser minimax-m2 | --tool-call-parser minimax_m2
--reasoning-parser deepseek-r1|deepseek-v3 | --reasoning-parser deepseek_r1
--reasoning-parser qwen3-thinking | --reasoning-parser qwen3
--reasoning-parser gpt-oss | --reasoning-parser openai_gptoss
--kv-cache-dtype --tool-call-parser --reasoning-parser {x} | the same
--watchdog-timeout {s} | --step-timeout {s}
--fastapi-root-path {x} | --root-path {x}
--log-requests | --enable-log-requests
--is-embedding | --runner pooling
--disable-radix-cache | --no-enable-prefix-caching
--disable-overlap-schedule | --no-async-scheduling
--disable-cuda-graph | --enforce-eager
--enable-deterministic-inference | --batch-invariant
--moe-a2a-backend {x} --enable-deepep-moe | not needed | experts use all-reduce, like other layers.
--quantization {x} | not needed | quantized checkpoints are recognized by their files.
--trust-remote-code | --trust-remote-code | leave it out if Oarlock or transformers has the model's class.
--model-impl sglang | --model-impl oarlock
--model-impl {x} | the same
--attention-backend --prefill-attention-backend --decode-attention-backend --sampling-backend --cuda-graph-max-bs
  --mm-attention-backend --moe-runner-backend {x} --enable-flashinfer-mla --enable-torch-compile --enable-p2p-check
  --triton-attention-reduce-in-fp32 --disable-custom-all-reduce --enable-symm-mem | not needed | kernels are selected
  automatically.
--enable-metrics | not needed | GET /metrics is always there.
--enable-cache-report | not needed | usage always includes cached tokens.
--grammar-backend {x} | not needed | grammars are compiled by llguidance.
--enable-mixed-chunk | not needed | prompts are always computed in chunks.
--max-total-tokens --max-prefill-tokens {n} | not needed | the number of tokens is measured at startup.
--schedule-policy --schedule-conservativeness {x} | not needed | the order is by priority, share and waiting time.
--stream-interval {n} | not needed | each token is sent immediately.
--skip-server-warmup --disable-tokenizer-batch-decode | not needed | steps are always measured at startup.
--tokenizer-worker-num {n} | not needed | a pool of threads tokenizes texts.
--tokenizer-mode {x} | not needed | the checkpoint's own fast tokenizer is used.
--log-requests-level {n} | not needed | the log contains no texts of requests.
--lora-paths {adapter}… | --enable-lora --lora-modules {adapter} | requests name an adapter in `model`, without the name
  of the model; set --max-lora-rank if one has a rank above 16.
--lora-target-modules all | not needed
--lora-target-modules {x}… --max-lora-rank {n} --enable-lora | the same
--max-loras-per-batch {n} | --max-loras {n}
--max-loaded-loras {n} | --max-cpu-loras {n}
--lora-eviction-policy lru | not needed
--lora-eviction-policy {x} | no equivalent | the adapter that was not used for the longest time leaves memory.
--lora-backend --max-lora-chunk-size {x} | not needed | kernels are selected automatically.
--enable-lora-overlap-loading | not needed | adapters are always loaded while other requests run.
--speculative-algorithm --speculative-algo --speculative-draft-model-path --speculative-num-steps
  --speculative-eagle-topk --speculative-num-draft-tokens {x} | no equivalent | use --speculative-config.
--enable-dp-attention --enable-dp-lm-head | no equivalent | attention is split among the ranks of a model.
--hicache-ratio --hicache-size --hicache-storage-backend --hicache-write-policy {x} --enable-hierarchical-cache | no
  equivalent | --kv-offload-memory and --kv-offload-path keep blocks that the pool evicts.
--cpu-offload-gb {x} | no equivalent | weights stay on the device.
--base-gpu-id {n} | no equivalent | CUDA_VISIBLE_DEVICES selects the devices.
--json-model-override-args {x} | no equivalent | config.json is used unchanged; edit a copy of the checkpoint.
--enable-multimodal | no equivalent | models take text only.
--disaggregation-mode --disaggregation-transfer-backend --disaggregation-ib-device {x} | no equivalent | all ranks
  compute prompts and responses.
--skip-tokenizer-init | no equivalent | texts are always tokenized here.
--torchao-config {x} | no equivalent | weights are quantized by --quantization int8 or int4.
"""
_TGI = """
--model-id {model} | MODEL {model}
--revision --dtype --port {x} | the same
--served-model-name --api-key {x}… | the same
--kv-cache-dtype fp8_e4m3fn | --kv-cache-dtype fp8_e4m3
--kv-cache-dtype {type} | the same
--quantize awq|gptq|fp8|compressed-tensors | not needed | quantized checkpoints are recognized by their files.
--quantize bitsandbytes|eetq | --quantization int8 | both have 8 bits per weight, but responses differ.
--quantize bitsandbytes-nf4|bitsandbytes-fp4 | --quantization int4 | both have 4 bits per weight, but responses differ.
--quantize marlin|exl2 | no equivalent | checkpoints in this format are not supported.
--quantize {x} | no equivalent | there is no such format of weights.
--num-shard {n} | --tensor-parallel-size {n}
--max-total-tokens {n} | --max-model-len {n}
--max-batch-prefill-tokens {n} | --max-num-batched-tokens {n}
--max-batch-size {n} | --max-num-seqs {n}
--max-concurrent-requests {n} | --max-waiting-requests {n}
--cuda-memory-fraction 1|1.0 | --gpu-memory-utilization 0.99
--cuda-memory-fraction {x} | --gpu-memory-utilization {x}
--hostname {host} | --host {host}
-p {n} | --port {n}
--huggingface-hub-cache --weights-cache-override {x} | --download-dir {x}
--payload-limit {n} | --max-body-size {n}
--cors-allow-origin {origin},… | --allowed-origins {origin}
--json-output | --log-format json
--sharded {x} | not needed | --tensor-parallel-size sets the number of ranks.
--max-input-tokens --max-input-length {n} | not needed | a prompt may fill the context.
--max-batch-total-tokens {n} | not needed | the number of tokens is measured at startup.
--waiting-served-ratio --max-waiting-tokens {x} | not needed | prompts are always computed in chunks.
--trust-remote-code | --trust-remote-code | leave it out if Oarlock or transformers has the model's class.
--prometheus-port {n} | not needed | GET /metrics is on the port of the server.
--cuda-graphs {x} | not needed | graphs are captured for all sizes that fit into memory.
--validation-workers {n} | not needed | a pool of threads tokenizes texts.
--usage-stats {x} | not needed | no usage data is sent.
--enable-prefill-logprobs | not needed | requests may ask for prompt_logprobs.
--max-top-n-tokens {n} | not needed | requests may ask for 20 alternatives of a token.
--shard-uds-path {x} | not needed | ranks need no sockets in the file system.
--max-stop-sequences {n} | no equivalent | requests may ask for 64 stop strings at most, and no flag changes it.
--disable-grammar-support | no equivalent | requests may use grammars, and no flag forbids it.
--disable-custom-kernels | no equivalent | --attention-backend selects the attention kernels.
--otlp-endpoint {url} | no equivalent | traces go over HTTP, not gRPC: --otlp-traces-endpoint.
--otlp-service-name {name} | no equivalent | OTEL_SERVICE_NAME sets the name of the service.
--lora-adapters {adapter},… | --enable-lora --lora-modules {adapter} | requests name an adapter in `model` instead of
  `adapter_id`; set --max-lora-rank if one has a rank above 16.
--speculate {n} | no equivalent | use --speculative-config.
--rope-scaling --rope-factor {x} | no equivalent | the model defines the scaling.
--max-best-of {n} | no equivalent | requests may ask for 128 choices at most, and no flag changes it.
--max-client-batch-size {n} | no equivalent | a request has as many inputs as its route allows, and no flag changes it.
--tokenizer-config-path {x} | no equivalent | use --chat-template FILE and --tokenizer.
--watermark-gamma --watermark-delta {x} | no equivalent | responses contain no watermark.
MASTER_ADDR MASTER_PORT {x} | not needed | ranks on one machine need no address.
--ngrok-authtoken --ngrok-edge {x} --ngrok | no equivalent | no tunnel is opened.
"""

_NO_MODEL = "give the model to `oarlock serve`: a server keeps one model loaded."
_THIS_LINE_SERVES = "this line starts a server; run `oarlock chat` in another terminal."
VLLM = Dialect(
    "vLLM", _VLLM, "vllm/vllm-openai|vllm-cpu-release-repo|rocm/vllm|nvidia/vllm", "0.0.0.0", 8000,
    "vLLM listens on every address by default; --host 127.0.0.1 accepts only clients on this machine.",
    {"vllm serve": "", "python -m vllm.entrypoints.openai.api_server": ""}, "VLLM_",
)  # fmt: skip
LLAMA_SERVER = Dialect(
    "llama-server", _LLAMA_SERVER, r"(ggml-org|ggerganov)/llama\.cpp", "127.0.0.1", 8080,
    "llama-server listens on port 8080 by default, since October 2026 on 9931.",
    {"llama-server": ""}, "LLAMA_", "LLAMA_ARG_",
)  # fmt: skip
TGI = Dialect(
    "Text Generation Inference", _TGI, "text-generation-inference", "0.0.0.0", 3000,
    "TGI listens on every address by default; --host 127.0.0.1 accepts only clients on this machine.",
    {"text-generation-launcher": ""}, flag_prefix="", image_port=80,
)  # fmt: skip
SGLANG = Dialect(
    "SGLang", _SGLANG, "lmsysorg/sglang", "127.0.0.1", 30000, "SGLang listens on port 30000 by default.",
    {"sglang serve": "", "python -m sglang.launch_server": ""}, "SGLANG_",
)  # fmt: skip
OLLAMA = Dialect(
    "Ollama", _OLLAMA, "ollama/ollama", "127.0.0.1", 11434,
    "Ollama listens on port 11434 by default; clients of its own API must use OpenAI's.",
    dict.fromkeys(("ollama serve", "ollama start"), _NO_MODEL) | {"ollama run": _THIS_LINE_SERVES}, "OLLAMA_",
)  # fmt: skip
DIALECTS = (VLLM, LLAMA_SERVER, TGI, SGLANG, OLLAMA)
