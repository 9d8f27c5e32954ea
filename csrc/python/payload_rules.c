/* SPDX-License-Identifier: Apache-2.0 */
/* The config, as far as payloads are concerned. */
#include "python/payload.h"

#include "python/errors.h"
#include "python/tensor.h"

#include <stdio.h>

/* ---- where the values live ------------------------------------------------------------------- */

/* Mappings of the config: constant, parent, name. Parents come before their children. */
#define SECTIONS(X)                                                                                \
    X(REMOTE_BACKEND, ROOT, remote_backend)                                                        \
    X(TRAIN, REMOTE_BACKEND, train)                                                                \
    X(ZORRO, TRAIN, zorro_train)                                                                   \
    X(LOGITS, TRAIN, logits)                                                                       \
    X(COMMS, REMOTE_BACKEND, comms)                                                                \
    X(POLICY, ROOT, actor_rollout_ref)                                                             \
    X(ACTOR, POLICY, actor)                                                                        \
    X(ROLLOUT, POLICY, rollout)                                                                    \
    X(DATA, ROOT, data)

typedef enum section {
    SECTION_ROOT,
#define SECTION_CONSTANT(constant, parent, name) SECTION_##constant,
    SECTIONS(SECTION_CONSTANT)
#undef SECTION_CONSTANT
        SECTION_COUNT
} section_t;

typedef enum value_kind { VALUE_BOOL, VALUE_INT, VALUE_ANY } value_kind_t;

#define RULE(member) offsetof(arl_payload_rules_t, member)

/* What is read: section, name, kind, least value, where the number goes (0: nowhere), where the
 * object goes (0: nowhere). Offset 0 is `final`, which is read apart. */
#define VALUES(X)                                                                                  \
    X(REMOTE_BACKEND, training_gpus, VALUE_INT, 0, RULE(training_ranks), 0)                        \
    X(REMOTE_BACKEND, log_prob_gpus, VALUE_INT, 0, RULE(reference_ranks), 0)                       \
    X(TRAIN, load_balancer, VALUE_BOOL, 0, RULE(balances), RULE(load_balancer))                    \
    X(ZORRO, enable, VALUE_BOOL, 0, RULE(zorro), RULE(zorro_train_enable))                         \
    X(ZORRO, max_rollouts, VALUE_INT, 0, RULE(max_rollouts), RULE(zorro_train_max_rollouts))       \
    X(LOGITS, optimization, VALUE_ANY, 0, 0, RULE(logits_optimization))                            \
    X(LOGITS, optimization_peak_mem_size_in_gib, VALUE_ANY, 0, 0,                                  \
      RULE(logits_optimization_peak_mem_size_in_gib))                                              \
    X(LOGITS, compute_in_fp32, VALUE_ANY, 0, 0, RULE(logits_compute_in_fp32))                      \
    X(COMMS, drop_position_ids, VALUE_BOOL, 0, RULE(drop_positions), RULE(drop_position_ids))      \
    X(ROLLOUT, n, VALUE_INT, 1, RULE(rollout_n), 0)                                                \
    X(ACTOR, ppo_mini_batch_size, VALUE_INT, 0, RULE(mini_batch_size), 0)                          \
    X(ACTOR, ppo_epochs, VALUE_INT, 0, RULE(epochs), 0)                                            \
    X(ACTOR, ppo_max_token_len_per_gpu, VALUE_INT, 0, RULE(max_token_len),                         \
      RULE(max_token_len_per_gpu))                                                                 \
    X(DATA, train_batch_size, VALUE_INT, 0, RULE(train_batch_size), 0)

typedef struct value {
    section_t section;
    size_t name; /* offset of the interned name in the state */
    value_kind_t kind;
    int64_t least;
    size_t number;
    size_t object;
} value_t;

#define NAME_AT(name) offsetof(arl_state_t, names.name)

static const value_t values[] = {
#define VALUE_ROW(section, name, kind, least, number, object)                                      \
    {SECTION_##section, NAME_AT(name), kind, least, number, object},
    VALUES(VALUE_ROW)
#undef VALUE_ROW
};

static const struct {
    section_t parent;
    size_t name;
} sections[SECTION_COUNT] = {
#define SECTION_ROW(constant, parent, name)                                                        \
    [SECTION_##constant] = {SECTION_##parent, NAME_AT(name)},
    SECTIONS(SECTION_ROW)
#undef SECTION_ROW
};

static PyObject *
name_at(const arl_state_t *state, size_t offset) /* borrowed from state */
{
    return *(PyObject *const *)((const char *)state + offset);
}

/* Writes the dotted path of `name` in `section`; cut off when it does not fit. */
static void
path_write(const arl_state_t *state, section_t section, PyObject *name, char *text, size_t size)
{
    const char *parts[SECTION_COUNT + 1];
    size_t used = 0;
    int count = 0;

    parts[count++] = PyUnicode_AsUTF8(name); /* interned ASCII: cannot fail */
    for (section_t s = section; s != SECTION_ROOT; s = sections[s].parent) {
        parts[count++] = PyUnicode_AsUTF8(name_at(state, sections[s].name));
    }
    while (count-- > 0 && used < size) {
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", parts[count], count > 0 ? "." : "");
    }
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The member of a mapping: a new reference, or NULL with ConfigError that has its path. */
static PyObject *
member_get(arl_state_t *state, PyObject *const *nodes, section_t section, PyObject *name)
{
    char path[160];
    PyObject *value = NULL;

    if (PyDict_Check(nodes[section])) {
        if (PyDict_GetItemRef(nodes[section], name, &value) != 0) {
            return value;
        }
    }
    path_write(state, section, name, path, sizeof(path));
    return arl_raise_format(state, ARL_ERR_CONFIG, "read config", "%s: is missing", path);
}

static int
value_store(arl_state_t *state, const value_t *value, PyObject *object, arl_payload_rules_t *rules)
{
    char path[160];
    int64_t number;

    if (value->kind == VALUE_BOOL && PyBool_Check(object)) {
        *(bool *)((char *)rules + value->number) = object == Py_True;
    }
    else if (value->kind == VALUE_INT && PyLong_Check(object) && !PyBool_Check(object)) {
        number = PyLong_AsLongLong(object);
        if (number == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (number < value->least) {
            path_write(state, value->section, name_at(state, value->name), path, sizeof(path));
            (void)arl_raise_format(state, ARL_ERR_CONFIG, "read config",
                                   "%s: is %lld, at least %lld is needed", path, (long long)number,
                                   (long long)value->least);
            return -1;
        }
        *(int64_t *)((char *)rules + value->number) = number;
    }
    else if (value->kind != VALUE_ANY) {
        path_write(state, value->section, name_at(state, value->name), path, sizeof(path));
        (void)arl_raise_format(state, ARL_ERR_CONFIG, "read config", "%s: %s is needed, %s found",
                               path, value->kind == VALUE_BOOL ? "a bool" : "an int",
                               arl_type_name(object));
        return -1;
    }
    if (value->object != 0) {
        Py_XSETREF(*(PyObject **)((char *)rules + value->object), Py_NewRef(object));
    }
    return 0;
}

static int
rules_read_values(arl_state_t *state, PyObject *const *nodes, arl_payload_rules_t *rules)
{
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        PyObject *object =
            member_get(state, nodes, values[i].section, name_at(state, values[i].name));
        int status;

        if (object == NULL) {
            return -1;
        }
        status = value_store(state, &values[i], object, rules);
        Py_DECREF(object);
        if (status < 0) {
            return -1;
        }
    }
    return 0;
}

static int
rules_read_generation(arl_state_t *state, PyObject *const *nodes, arl_payload_rules_t *rules)
{
    PyObject *generation =
        member_get(state, nodes, SECTION_REMOTE_BACKEND, state->names.generation);
    bool seed = false;

    if (generation == NULL) {
        return -1;
    }
    if (PyUnicode_Check(generation)) {
        seed = PyUnicode_CompareWithASCIIString(generation, "seed") == 0;
        rules->final = PyUnicode_CompareWithASCIIString(generation, "final") == 0;
    }
    Py_DECREF(generation);
    if (seed == rules->final) {
        (void)arl_raise_format(state, ARL_ERR_CONFIG, "read config",
                               "remote_backend.generation: is neither \"seed\" nor \"final\"");
        return -1;
    }
    return 0;
}

/* What the client derives as gradient_accumulation_steps (contract 2.3). */
static int
rules_read_accumulation(arl_state_t *state, PyObject *const *nodes, arl_payload_rules_t *rules)
{
    PyObject *object =
        member_get(state, nodes, SECTION_ACTOR, state->names.ppo_micro_batch_size_per_gpu);
    int64_t micro = 0, rows = rules->final ? rules->mini_batch_size : rules->train_batch_size;
    int64_t step = rules->training_ranks > 0 ? rules->training_ranks : 1;

    if (object == NULL) {
        return -1;
    }
    if (object != Py_None) {
        micro = PyLong_AsLongLong(object);
    }
    Py_DECREF(object);
    if (micro == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (__builtin_mul_overflow(rows, rules->rollout_n, &rows) ||
        __builtin_mul_overflow(step, micro > 0 ? micro : 1, &step)) {
        (void)arl_raise_format(state, ARL_ERR_CONFIG, "read config", "the batch sizes overflow");
        return -1;
    }
    rules->accumulation = rows / step > 1 ? rows / step : 1;
    return 0;
}

int
arl_payload_rules_init(arl_state_t *state, PyObject *config, arl_payload_rules_t *rules)
{
    PyObject *nodes[SECTION_COUNT] = {Py_NewRef(config)};
    int status = -1;

    for (section_t s = SECTION_ROOT + 1; s < SECTION_COUNT; s++) {
        nodes[s] = member_get(state, nodes, sections[s].parent, name_at(state, sections[s].name));
        if (nodes[s] == NULL) {
            goto release_nodes;
        }
    }
    if (rules_read_generation(state, nodes, rules) < 0 ||
        rules_read_values(state, nodes, rules) < 0 ||
        rules_read_accumulation(state, nodes, rules) < 0) {
        arl_payload_rules_clear(rules);
        goto release_nodes;
    }
    if (!rules->final) {
        /* The flat generation's server balances if, and only if, prompt sharing is on, and its
         * client always sends position ids. */
        rules->balances = rules->zorro;
        rules->drop_positions = false;
    }
    status = 0;
release_nodes:
    for (section_t s = SECTION_ROOT; s < SECTION_COUNT; s++) {
        Py_XDECREF(nodes[s]);
    }
    return status;
}

int
arl_payload_rules_traverse(arl_payload_rules_t *rules, visitproc visit, void *arg)
{
#define ARL_RULE_VISIT(name) Py_VISIT(rules->name);
    ARL_PAYLOAD_RULE_OBJECTS(ARL_RULE_VISIT)
#undef ARL_RULE_VISIT
    return 0;
}

void
arl_payload_rules_clear(arl_payload_rules_t *rules)
{
#define ARL_RULE_CLEAR(name) Py_CLEAR(rules->name);
    ARL_PAYLOAD_RULE_OBJECTS(ARL_RULE_CLEAR)
#undef ARL_RULE_CLEAR
}

int64_t
arl_payload_minibatches(arl_state_t *state, const arl_payload_rules_t *rules, const char *operation)
{
    if (!rules->final) {
        return 1;
    }
    if (rules->mini_batch_size < 1 || rules->train_batch_size < rules->mini_batch_size ||
        rules->train_batch_size % rules->mini_batch_size != 0) {
        (void)arl_raise_format(
            state, ARL_ERR_CONFIG, operation,
            "data.train_batch_size %lld is not a multiple of "
            "actor_rollout_ref.actor.ppo_mini_batch_size %lld (both count prompts, "
            "not rows)",
            (long long)rules->train_batch_size, (long long)rules->mini_batch_size);
        return -1;
    }
    if (rules->epochs < 1) {
        (void)arl_raise_format(state, ARL_ERR_CONFIG, operation,
                               "actor_rollout_ref.actor.ppo_epochs is %lld, at least 1 is needed",
                               (long long)rules->epochs);
        return -1;
    }
    return rules->train_batch_size / rules->mini_batch_size;
}
