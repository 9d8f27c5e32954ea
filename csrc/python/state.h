/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_STATE_H
#define ARL_PYTHON_STATE_H

#include "python/arl_python.h"

#include "core/arl_dtype.h"

/*
 * Everything the module owns. Each list below generates the field, its visit in traverse and
 * its clear, so that none can be forgotten; tests compare the lists with the running module.
 */

/* Types: field. Made by the file named after them; created in arl_<feature>_exec. */
#define ARL_STATE_TYPES(X)                                                                         \
    X(client_type)                                                                                 \
    X(operation_type)                                                                              \
    X(weight_sender_type)                                                                          \
    X(weight_receiver_type)                                                                        \
    X(weight_views_type)                                                                           \
    X(weight_view_type)                                                                            \
    X(sync_stats_type)

/* Objects that are looked up once: torch and its members stay NULL until a torch tensor is met.
 * Feature files may add lines for what they cache. */
#define ARL_STATE_OBJECTS(X)                                                                       \
    X(torch)                                                                                       \
    X(torch_tensor_type)                                                                           \
    X(torch_parameter_type)                                                                        \
    X(torch_exchange)                                                                              \
    X(torch_from_numpy)                                                                            \
    X(torch_nested_type)                                                                           \
    X(torch_nested_from_jagged)                                                                    \
    X(torch_jagged)                                                                                \
    X(torch_strided)                                                                               \
    X(torch_dtypes)                                                                                \
    X(cpu_text)                                                                                    \
    X(json_dumps)                                                                                  \
    X(json_loads)                                                                                  \
    X(logger)

/* Exceptions: field, name, base field, builtin base or NULL, docstring. */
#define ARL_STATE_ERRORS(X)                                                                        \
    X(arctic_error, "ArcticError", NULL, PyExc_Exception,                                          \
      "Base of every error that this package raises by itself.\n\n"                                \
      "Attributes: code (str, the status name), operation (str, the call that failed),\n"          \
      "rank (int or None, the peer's rank), domain (str) and foreign (int): the number that a\n"   \
      "system or foreign library call gave, and whose number it is.")                              \
    X(config_error, "ConfigError", arctic_error, PyExc_ValueError,                                 \
      "A configuration is wrong: unknown, renamed or contradictory key, or a bad value.")          \
    X(payload_error, "PayloadError", arctic_error, PyExc_ValueError,                               \
      "A batch cannot be turned into a payload; names the key, the row and the numbers.")          \
    X(wire_error, "WireError", arctic_error, PyExc_ValueError,                                     \
      "Bytes are not a valid frame of the wire format.")                                           \
    X(closed_error, "ClosedError", arctic_error, PyExc_ValueError,                                 \
      "The object was destroyed or closed before this call.")                                      \
    X(process_error, "WrongProcessError", arctic_error, PyExc_RuntimeError,                        \
      "The object was made in another process: it was inherited through fork.")                    \
    X(transport_unavailable_error, "TransportUnavailableError", arctic_error, PyExc_RuntimeError,  \
      "The transport cannot be used here; says why and what can be.")                              \
    X(weight_sync_error, "WeightSyncError", arctic_error, PyExc_RuntimeError,                      \
      "A weight sync failed.")                                                                     \
    X(weight_mismatch_error, "WeightMismatchError", weight_sync_error, NULL,                       \
      "Names, dtypes or shapes differ between sender and receiver. Nothing was written.")          \
    X(peer_timeout_error, "PeerTimeoutError", weight_sync_error, PyExc_TimeoutError,               \
      "The other side did not do its part before the deadline.")                                   \
    X(peer_lost_error, "PeerLostError", weight_sync_error, PyExc_ConnectionError,                  \
      "The other side exited, was killed or restarted.")                                           \
    X(torn_weights_error, "TornWeightsError", weight_sync_error, NULL,                             \
      "An earlier pull failed after it had begun to write: the weights are a mixture. A full\n"    \
      "pull that succeeds ends this state.")

/* Strings used as attribute names or dictionary keys: one interned object each. Feature files
 * add the names they look up in a hot path. */
#define ARL_STATE_NAMES(X)                                                                         \
    X(__dict__)                                                                                    \
    X(__dlpack__)                                                                                  \
    X(_lengths)                                                                                    \
    X(_metadata)                                                                                   \
    X(_offsets)                                                                                    \
    X(_values)                                                                                     \
    X(actor)                                                                                       \
    X(actor_config)                                                                                \
    X(actor_rollout_ref)                                                                           \
    X(advantages)                                                                                  \
    X(apply_temperature)                                                                           \
    X(attention_mask)                                                                              \
    X(batch)                                                                                       \
    X(batch_num_tokens)                                                                            \
    X(calculate_entropy)                                                                           \
    X(clip_ratio)                                                                                  \
    X(clip_ratio_c)                                                                                \
    X(clip_ratio_high)                                                                             \
    X(clip_ratio_low)                                                                              \
    X(comms)                                                                                       \
    X(compute_entropy_and_logprobs)                                                                \
    X(compute_in_fp32)                                                                             \
    X(cpu)                                                                                         \
    X(cuda)                                                                                        \
    X(cuda_ipc)                                                                                    \
    X(cuda_stream)                                                                                 \
    X(data)                                                                                        \
    X(data_ptr)                                                                                    \
    X(decode)                                                                                      \
    X(detach)                                                                                      \
    X(device)                                                                                      \
    X(drop_position_ids)                                                                           \
    X(dtype)                                                                                       \
    X(enable)                                                                                      \
    X(entropy)                                                                                     \
    X(entropy_coeff)                                                                               \
    X(fwd_bwd)                                                                                     \
    X(fwd_no_grad)                                                                                 \
    X(generate)                                                                                    \
    X(generation)                                                                                  \
    X(global_batch_size)                                                                           \
    X(global_token_num)                                                                            \
    X(index)                                                                                       \
    X(input_ids)                                                                                   \
    X(is_conj)                                                                                     \
    X(is_neg)                                                                                      \
    X(is_nested)                                                                                   \
    X(last_lr)                                                                                     \
    X(layout)                                                                                      \
    X(lengths)                                                                                     \
    X(level)                                                                                       \
    X(load_balancer)                                                                               \
    X(load_checkpoint)                                                                             \
    X(log_prob_gpus)                                                                               \
    X(log_probs)                                                                                   \
    X(logits)                                                                                      \
    X(logits_compute_in_fp32)                                                                      \
    X(logits_optimization)                                                                         \
    X(logits_optimization_peak_mem_size_in_gib)                                                    \
    X(logprobs)                                                                                    \
    X(loss)                                                                                        \
    X(loss_fn)                                                                                     \
    X(loss_mask)                                                                                   \
    X(loss_mode)                                                                                   \
    X(loss_scale_factor)                                                                           \
    X(low_memory)                                                                                  \
    X(lr)                                                                                          \
    X(max_prompt_len)                                                                              \
    X(max_response_len)                                                                            \
    X(max_rollouts)                                                                                \
    X(max_token_len_per_gpu)                                                                       \
    X(max_tokens)                                                                                  \
    X(meta)                                                                                        \
    X(metrics)                                                                                     \
    X(model_output)                                                                                \
    X(n)                                                                                           \
    X(name)                                                                                        \
    X(offsets)                                                                                     \
    X(old_log_probs)                                                                               \
    X(optimization)                                                                                \
    X(optimization_peak_mem_size_in_gib)                                                           \
    X(pad_token_id)                                                                                \
    X(path)                                                                                        \
    X(policy_loss)                                                                                 \
    X(policy_loss_config)                                                                          \
    X(position_ids)                                                                                \
    X(post)                                                                                        \
    X(ppo_epochs)                                                                                  \
    X(ppo_max_token_len_per_gpu)                                                                   \
    X(ppo_micro_batch_size_per_gpu)                                                                \
    X(ppo_mini_batch_size)                                                                         \
    X(processing)                                                                                  \
    X(prompts)                                                                                     \
    X(reconnect_handle)                                                                            \
    X(ref_log_prob)                                                                                \
    X(reference_model)                                                                             \
    X(remote_backend)                                                                              \
    X(reset_prefix_cache)                                                                          \
    X(response_mask)                                                                               \
    X(responses)                                                                                   \
    X(rollout)                                                                                     \
    X(rollout_is_weights)                                                                          \
    X(rollout_n)                                                                                   \
    X(routing_key)                                                                                 \
    X(sampling_params)                                                                             \
    X(save_checkpoint)                                                                             \
    X(shape)                                                                                       \
    X(shutdown)                                                                                    \
    X(sleep_inference)                                                                             \
    X(step)                                                                                        \
    X(strict)                                                                                      \
    X(stride)                                                                                      \
    X(sync_weights)                                                                                \
    X(tags)                                                                                        \
    X(temperature)                                                                                 \
    X(tolist)                                                                                      \
    X(train)                                                                                       \
    X(train_batch_size)                                                                            \
    X(training_gpus)                                                                               \
    X(transport)                                                                                   \
    X(type)                                                                                        \
    X(untyped_storage)                                                                             \
    X(use_kl_loss)                                                                                 \
    X(values)                                                                                      \
    X(verl_grpo)                                                                                   \
    X(view)                                                                                        \
    X(wake_inference)                                                                              \
    X(zorro_train)                                                                                 \
    X(zorro_train_enable)                                                                          \
    X(zorro_train_max_rollouts)

typedef struct arl_state {
#define ARL_STATE_FIELD_TYPE(field) PyTypeObject *field;
    ARL_STATE_TYPES(ARL_STATE_FIELD_TYPE)
#undef ARL_STATE_FIELD_TYPE
#define ARL_STATE_FIELD_OBJECT(field) PyObject *field;
    ARL_STATE_OBJECTS(ARL_STATE_FIELD_OBJECT)
#undef ARL_STATE_FIELD_OBJECT
#define ARL_STATE_FIELD_ERROR(field, name, base, builtin, doc) PyObject *field;
    ARL_STATE_ERRORS(ARL_STATE_FIELD_ERROR)
#undef ARL_STATE_FIELD_ERROR
    struct {
#define ARL_STATE_FIELD_NAME(name) PyObject *name;
        ARL_STATE_NAMES(ARL_STATE_FIELD_NAME)
#undef ARL_STATE_FIELD_NAME
    } names;
    PyObject *torch_dtype_of[ARL_DTYPE_COUNT]; /* torch.float32, …; NULL where torch has none */
} arl_state_t;

extern struct PyModuleDef arl_module_def;

static inline arl_state_t *
arl_state_from_module(PyObject *module)
{
    return (arl_state_t *)PyModule_GetState(module); /* never NULL: m_size > 0 */
}

/* For methods of our own types and of their subclasses. NULL with TypeError for others. */
arl_state_t *arl_state_from_type(PyTypeObject *type);

/*
 * One line per feature file: its method table (ends with an empty entry; may be NULL) and what
 * it adds to the module at exec. module.c walks this list.
 */
#define ARL_FEATURES(X)                                                                            \
    X(errors)                                                                                      \
    X(batch)                                                                                       \
    X(config)                                                                                      \
    X(wire)                                                                                        \
    X(payload)                                                                                     \
    X(client)                                                                                      \
    X(operation)                                                                                   \
    X(weight_sender)                                                                               \
    X(weight_receiver)                                                                             \
    X(weight_views)                                                                                \
    X(sync_stats)                                                                                  \
    X(show_config)

#define ARL_FEATURE_DECLARE(feature)                                                               \
    extern PyMethodDef arl_##feature##_methods[];                                                  \
    int arl_##feature##_exec(PyObject *module, arl_state_t *state);
ARL_FEATURES(ARL_FEATURE_DECLARE)
#undef ARL_FEATURE_DECLARE

/* PyType_FromModuleAndSpec, stored in *slot and added to the module under its own name. */
int arl_state_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

#endif
