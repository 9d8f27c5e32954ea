/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The batch kernels as Python functions, and as C functions for the payload builders. A call
 * imports its inputs, checks all of them, makes the output, and only then moves bytes.
 */
#include "python/batch.h"

#include "core/arl_threads.h"
#include "python/args.h"
#include "python/errors.h"

#include <string.h>

/* ---- what every kernel does around its bytes ------------------------------------------------- */

/* A new dense result while it is being filled: between begin and end the GIL may be released. */
typedef struct output {
    PyObject *object;
    arl_view_t view;
    PyThreadState *saved;
} output_t;

static int
output_begin(arl_state_t *state, arl_tensor_kind_t like, arl_dtype_t dtype, int ndim,
             const int64_t *shape, output_t *out)
{
    out->object = arl_tensor_new(state, like, dtype, ndim, shape, &out->view);
    if (out->object == NULL) {
        return -1;
    }
    if (arl_batch_begin(state, arl_view_nbytes(&out->view), &out->saved) < 0) {
        Py_CLEAR(out->object);
        return -1;
    }
    return 0;
}

static PyObject *
output_end(output_t *out)
{
    arl_batch_end(out->saved);
    return out->object;
}

/* ---- jagged to padded ------------------------------------------------------------------------ */

PyObject *
arl_batch_pad(arl_state_t *state, const arl_nested_t *input, const arl_batch_layout_t *layout,
              const unsigned char fill[ARL_ITEM_MAX], bool truncate, const char *key)
{
    const arl_view_t *values = &input->values.view;
    arl_pad_job_t job = {
        .input = arl_batch_jagged(input),
        .prompt_lengths = layout->prompt_lengths,
        .response_lengths = layout->response_lengths,
        .prompt_width = layout->prompt_width,
        .response_width = layout->response_width,
        .truncate = truncate,
    };
    arl_error_t err = ARL_ERROR_INIT;
    output_t out;

    if (input->rows != layout->rows) {
        return arl_raise_format(state, ARL_ERR_PAYLOAD, "pad_prompt_response",
                                "%s: has %lld rows, prompts and responses have %lld", key,
                                (long long)input->rows, (long long)layout->rows);
    }
    if (arl_pad_check(&job, key, &err) != ARL_OK) {
        return arl_raise(state, &err);
    }
    memcpy(job.fill, fill, values->itemsize);
    if (output_begin(state, input->values.kind, values->dtype, 2,
                     (int64_t[]){input->rows, job.prompt_width + job.response_width}, &out) < 0) {
        return NULL;
    }
    job.out = out.view.data;
    arl_pad_run(&job);
    return output_end(&out);
}

/* ---- dense to left-padded -------------------------------------------------------------------- */

/* A dense [rows, width] tensor, as the core's kernels read it. */
static int
matrix_import(arl_state_t *state, PyObject *object, const char *key, arl_tensor_t *tensor,
              arl_matrix_t *matrix)
{
    const arl_view_t *view = &tensor->view;

    if (arl_tensor_import(state, object, key, ARL_TENSOR_CPU_ONLY, ARL_ERR_PAYLOAD, tensor) < 0) {
        return -1;
    }
    if (view->ndim != 2) {
        char text[96];

        arl_view_describe(view, text, sizeof(text));
        (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "import tensor",
                               "%s: is %s, a dense [rows, width] tensor is needed", key, text);
        arl_tensor_release(tensor);
        return -1;
    }
    *matrix = (arl_matrix_t){.data = view->data,
                             .itemsize = view->itemsize,
                             .rows = view->shape[0],
                             .width = view->shape[1],
                             .row_stride = view->strides[0],
                             .col_stride = view->strides[1]};
    return 0;
}

static PyObject *
left_pad_new(arl_state_t *state, const arl_tensor_t *tensor, const arl_matrix_t *matrix,
             int64_t width)
{
    arl_left_pad_job_t job = {.in = *matrix, .width = width};
    output_t out;

    if (output_begin(state, tensor->kind, tensor->view.dtype, 2, (int64_t[]){matrix->rows, width},
                     &out) < 0) {
        return NULL;
    }
    job.out = out.view.data;
    arl_left_pad_run(&job);
    return output_end(&out);
}

PyObject *
arl_batch_left_pad(arl_state_t *state, PyObject *object, int64_t width, arl_batch_wide_t wide,
                   const char *key)
{
    arl_tensor_t tensor = {0};
    arl_matrix_t matrix;
    PyObject *result;

    if (matrix_import(state, object, key, &tensor, &matrix) < 0) {
        return NULL;
    }
    if (matrix.width == width || (matrix.width > width && wide == ARL_BATCH_WIDE_KEEP)) {
        result = Py_NewRef(object);
    }
    else if (matrix.width > width) {
        result = arl_raise_format(state, ARL_ERR_PAYLOAD, "left_pad",
                                  "%s: has %lld columns, more than the width %lld it is to be "
                                  "padded to",
                                  key, (long long)matrix.width, (long long)width);
    }
    else {
        result = left_pad_new(state, &tensor, &matrix, width);
    }
    arl_tensor_release(&tensor);
    return result;
}

/* ---- padded to jagged ------------------------------------------------------------------------ */

/* What is made `like` a nested tensor gets its offsets, so its rows must fill the values. */
static int
nested_check_dense(arl_state_t *state, const arl_nested_t *nested, const char *key)
{
    for (int64_t row = 0; row < nested->rows; row++) {
        if (nested->lengths[row] != nested->offsets[row + 1] - nested->offsets[row]) {
            (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "import nested tensor",
                                   "%s: row %lld has %lld elements in room for %lld; make it "
                                   "contiguous first",
                                   key, (long long)row, (long long)nested->lengths[row],
                                   (long long)(nested->offsets[row + 1] - nested->offsets[row]));
            return -1;
        }
    }
    return 0;
}

/* The mask says where each row starts; it must be as long as `like` says. */
static int
jagged_check_rows(arl_state_t *state, const arl_nested_t *like, const int64_t *lengths)
{
    for (int64_t row = 0; row < like->rows; row++) {
        if (lengths[row] != like->lengths[row]) {
            (void)arl_raise_format(state, ARL_ERR_PAYLOAD, "make_jagged",
                                   "attention_mask: row %lld has %lld ones, but its jagged row "
                                   "has %lld elements",
                                   (long long)row, (long long)lengths[row],
                                   (long long)like->lengths[row]);
            return -1;
        }
    }
    return 0;
}

/* The result over new 1-D `values`, which it consumes; NULL goes through. */
static PyObject *
jagged_wrap(arl_state_t *state, arl_tensor_kind_t kind, PyObject *values, PyObject *offsets)
{
    PyObject *result = values == NULL ? NULL : arl_nested_new(state, kind, values, offsets);

    Py_XDECREF(values);
    return result;
}

static PyObject *
jagged_values(arl_state_t *state, const arl_tensor_t *dense, arl_unpad_job_t *job, int64_t total)
{
    arl_error_t err = ARL_ERROR_INIT;
    output_t out;

    if (arl_unpad_check(job, "dense", &err) != ARL_OK) {
        return arl_raise(state, &err);
    }
    if (output_begin(state, dense->kind, dense->view.dtype, 1, &total, &out) < 0) {
        return NULL;
    }
    job->out = out.view.data;
    arl_unpad_run(job);
    return output_end(&out);
}

static PyObject *
make_jagged(arl_state_t *state, const arl_tensor_t *dense, const arl_matrix_t *matrix,
            PyObject *attention_mask, const arl_nested_t *like, const char *key)
{
    arl_unpad_job_t job = {.in = *matrix, .offsets = like->offsets};
    PyObject *result = NULL;
    int64_t *starts;

    if (like->rows != matrix->rows) {
        return arl_raise_format(state, ARL_ERR_PAYLOAD, "make_jagged",
                                "%s: has %lld rows, like has %lld", key, (long long)matrix->rows,
                                (long long)like->rows);
    }
    if ((dense->kind == ARL_TENSOR_TORCH) !=
        (arl_is_torch_tensor(state, like->offsets_object) == 1)) {
        return arl_raise_format(state, ARL_ERR_PAYLOAD, "make_jagged",
                                "%s and the offsets of like: one is a torch tensor, the other is "
                                "not; pass both in one form",
                                key);
    }
    starts = arl_batch_mask_spans(state, attention_mask, matrix->rows, matrix->width);
    if (starts == NULL) {
        return NULL;
    }
    job.starts = starts;
    job.lengths = starts + matrix->rows;
    if (jagged_check_rows(state, like, job.lengths) == 0) {
        result = jagged_wrap(state, dense->kind,
                             jagged_values(state, dense, &job, like->offsets[like->rows]),
                             like->offsets_object);
    }
    PyMem_Free(starts);
    return result;
}

PyObject *
arl_batch_make_jagged(arl_state_t *state, PyObject *dense, PyObject *attention_mask, PyObject *like,
                      const char *key)
{
    arl_tensor_t tensor = {0};
    arl_nested_t nested = {0};
    arl_matrix_t matrix;
    PyObject *result = NULL;

    if (matrix_import(state, dense, key, &tensor, &matrix) < 0) {
        return NULL;
    }
    if (arl_batch_nested_import(state, like, "like", &nested) == 0) {
        if (nested_check_dense(state, &nested, "like") == 0) {
            result = make_jagged(state, &tensor, &matrix, attention_mask, &nested, key);
        }
        arl_nested_release(&nested);
    }
    arl_tensor_release(&tensor);
    return result;
}

/* ---- predict-next shift ---------------------------------------------------------------------- */

static PyObject *
shifted_values(arl_state_t *state, const arl_tensor_t *values)
{
    const arl_view_t *in = &values->view;
    output_t out;

    if (output_begin(state, values->kind, in->dtype, 1, in->shape, &out) < 0) {
        return NULL;
    }
    arl_shift_predict_next_run(in->data, in->strides[0], out.view.data, in->itemsize, in->shape[0]);
    return output_end(&out);
}

PyObject *
arl_batch_shift_predict_next(arl_state_t *state, PyObject *nested, const char *key)
{
    arl_nested_t rows = {0};
    PyObject *result = NULL;

    if (arl_batch_nested_import(state, nested, key, &rows) < 0) {
        return NULL;
    }
    if (nested_check_dense(state, &rows, key) == 0) {
        result = jagged_wrap(state, rows.values.kind, shifted_values(state, &rows.values),
                             rows.offsets_object);
    }
    arl_nested_release(&rows);
    return result;
}

/* ---- Python functions ------------------------------------------------------------------------ */

static const char *const pad_names[] = {
    "input",     "prompts",      "responses",      "attention_mask",
    "pad_value", "prompt_width", "response_width", "truncate",
};
enum {
    PAD_INPUT,
    PAD_PROMPTS,
    PAD_RESPONSES,
    PAD_MASK,
    PAD_VALUE,
    PAD_PROMPT_WIDTH,
    PAD_RESPONSE_WIDTH,
    PAD_TRUNCATE,
    PAD_COUNT,
};
static const arl_signature_t pad_signature = {"pad_prompt_response", PAD_COUNT, 4, 3, pad_names};

PyDoc_STRVAR(
    pad_doc,
    "pad_prompt_response(input, prompts, responses, attention_mask=None, *, pad_value=0,\n"
    "                    prompt_width=None, response_width=None, truncate=False)\n"
    "--\n\n"
    "Jagged rows to the padded wire layout, in one pass.\n\n"
    "Row i of `input` is its prompt followed by its response. In the result the prompt is\n"
    "right-aligned in the first `prompt_width` columns, the response left-aligned in the\n"
    "`response_width` columns after it; `pad_value` fills the rest.\n\n"
    "Parameters\n"
    "----------\n"
    "input : nested jagged torch tensor, or tuple (values, offsets)\n"
    "    One-dimensional rows of any fixed-width dtype, on the CPU. Values and offsets may be\n"
    "    torch tensors, NumPy arrays or objects with __dlpack__.\n"
    "prompts, responses\n"
    "    How long each part is, both in one form: nested tensors (lengths from their offsets);\n"
    "    dense [rows, P] and [rows, R] (lengths from `attention_mask`); or row lengths, as a\n"
    "    list or a 1-D int32 or int64 tensor. Of nested and dense ones only the sizes are read.\n"
    "attention_mask : [rows, P + R] of bool or integers, optional\n"
    "    Needed with dense prompts: the ones of a row are one run across column P. In the other\n"
    "    forms its rows, when given, must hold as many ones as `input` has elements.\n"
    "pad_value : number\n"
    "    Must fit the dtype of `input`.\n"
    "prompt_width, response_width : int, optional\n"
    "    Columns of each part. Default: P and R in the dense form, else the longest row.\n"
    "truncate : bool\n"
    "    Cut longer parts (a prompt's start, a response's end) instead of refusing them.\n\n"
    "Returns\n"
    "-------\n"
    "(tensor, prompt_width, response_width)\n"
    "    Dense [rows, prompt_width + response_width] of input's dtype, torch if `input` is\n"
    "    torch, else NumPy; newly allocated and without gradient.\n\n"
    "Raises PayloadError (a ValueError) for lengths that do not add up, parts longer than their\n"
    "width, mixed forms, masks with gaps, a pad value that is None or does not fit; it names\n"
    "the argument, the row and the numbers.");

static PyObject *
pad_build(arl_state_t *state, PyObject *const *bound, const arl_batch_layout_t *layout,
          bool truncate)
{
    unsigned char fill[ARL_ITEM_MAX] = {0};
    arl_nested_t input = {0};
    PyObject *tensor = NULL;

    if (arl_batch_nested_import(state, bound[PAD_INPUT], "input", &input) < 0) {
        return NULL;
    }
    if (bound[PAD_VALUE] == NULL ||
        arl_batch_fill(state, bound[PAD_VALUE], input.values.view.dtype, "input", fill) == 0) {
        tensor = arl_batch_pad(state, &input, layout, fill, truncate, "input");
    }
    arl_nested_release(&input);
    if (tensor == NULL) {
        return NULL;
    }
    return Py_BuildValue("NLL", tensor, (long long)layout->prompt_width,
                         (long long)layout->response_width);
}

static PyObject *
batch_pad_prompt_response(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    arl_state_t *state = arl_state_from_module(module);
    arl_batch_layout_t layout = {0};
    PyObject *bound[PAD_COUNT], *result;
    int64_t prompt_width, response_width;
    bool truncate;

    if (arl_args_bind(&pad_signature, args, nargs, kwnames, bound) < 0 ||
        arl_args_size(&pad_signature, PAD_PROMPT_WIDTH, bound[PAD_PROMPT_WIDTH], -1,
                      &prompt_width) < 0 ||
        arl_args_size(&pad_signature, PAD_RESPONSE_WIDTH, bound[PAD_RESPONSE_WIDTH], -1,
                      &response_width) < 0 ||
        arl_args_flag(bound[PAD_TRUNCATE], false, &truncate) < 0 ||
        arl_batch_layout_import(state, bound[PAD_PROMPTS], bound[PAD_RESPONSES], bound[PAD_MASK],
                                prompt_width, response_width, &layout) < 0) {
        return NULL;
    }
    result = pad_build(state, bound, &layout, truncate);
    arl_batch_layout_release(&layout);
    return result;
}

static const char *const left_pad_names[] = {"tensor", "width", "on_wide"};
static const arl_signature_t left_pad_signature = {"left_pad", 3, 2, 2, left_pad_names};

PyDoc_STRVAR(
    left_pad_doc,
    "left_pad(tensor, width, *, on_wide='error')\n"
    "--\n\n"
    "Zeros on the left of a dense [rows, R], up to `width` columns.\n\n"
    "Any fixed-width dtype, any strides, read-only memory too. Returns a new dense tensor\n"
    "[rows, width] (torch if `tensor` is torch, else NumPy), or `tensor` itself where it\n"
    "has that width already. One that is wider raises PayloadError, or is returned itself\n"
    "with on_wide='keep'.");

static PyObject *
batch_left_pad(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    arl_state_t *state = arl_state_from_module(module);
    arl_batch_wide_t wide = ARL_BATCH_WIDE_ERROR;
    PyObject *bound[3];
    int64_t width;

    if (arl_args_bind(&left_pad_signature, args, nargs, kwnames, bound) < 0) {
        return NULL;
    }
    if (bound[1] == Py_None) {
        return PyErr_Format(PyExc_TypeError, "left_pad() argument 'width' must be an integer");
    }
    if (arl_args_size(&left_pad_signature, 1, bound[1], 0, &width) < 0) {
        return NULL;
    }
    if (bound[2] != NULL) {
        if (!PyUnicode_Check(bound[2]) ||
            (PyUnicode_CompareWithASCIIString(bound[2], "error") != 0 &&
             PyUnicode_CompareWithASCIIString(bound[2], "keep") != 0)) {
            return PyErr_Format(PyExc_ValueError,
                                "left_pad() argument 'on_wide' must be 'error' or 'keep', got %R",
                                bound[2]);
        }
        wide = PyUnicode_CompareWithASCIIString(bound[2], "keep") == 0 ? ARL_BATCH_WIDE_KEEP
                                                                       : ARL_BATCH_WIDE_ERROR;
    }
    return arl_batch_left_pad(state, bound[0], width, wide, "tensor");
}

static const char *const make_jagged_names[] = {"dense", "attention_mask", "like"};
static const arl_signature_t make_jagged_signature = {"make_jagged", 3, 3, 3, make_jagged_names};

PyDoc_STRVAR(
    make_jagged_doc,
    "make_jagged(dense, attention_mask, like)\n"
    "--\n\n"
    "The way back: rows of a dense [rows, width] as a jagged tensor with the rows of `like`.\n\n"
    "Row i is cut from the column of the first 1 in row i of `attention_mask` (the same shape,\n"
    "bool or integers) on, as long as row i of `like`. `like` is a nested jagged torch tensor,\n"
    "whose very offsets the result gets, or a tuple (values, offsets). Returns a nested torch\n"
    "tensor for torch inputs, else the tuple (values, offsets); newly allocated values of the\n"
    "dtype of `dense`, without gradient.\n\n"
    "Raises PayloadError, naming the row, where the ones of the mask are not one run or not as\n"
    "many as the jagged row has elements.");

static PyObject *
batch_make_jagged(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *bound[3];

    if (arl_args_bind(&make_jagged_signature, args, nargs, kwnames, bound) < 0) {
        return NULL;
    }
    return arl_batch_make_jagged(arl_state_from_module(module), bound[0], bound[1], bound[2],
                                 "dense");
}

PyDoc_STRVAR(
    shift_doc,
    "shift_predict_next(nested, /)\n"
    "--\n\n"
    "Response-aligned values to predict-next ones: the flat values one slot to the left.\n\n"
    "`nested` is a nested jagged torch tensor or a tuple (values, offsets). The whole value\n"
    "vector moves, so the last slot of a row takes the first of the next row; the last slot\n"
    "of all becomes zero. Returns the same form with the same offsets object.");

static PyObject *
batch_shift_predict_next(PyObject *module, PyObject *nested)
{
    return arl_batch_shift_predict_next(arl_state_from_module(module), nested, "nested");
}

PyDoc_STRVAR(thread_count_doc,
             "thread_count()\n"
             "--\n\n"
             "Threads that a large batch is split over, the caller's included.\n\n"
             "ARCTIC_RL_C_THREADS where it is set, else the CPUs that this process may use\n"
             "(affinity, cgroup quota). Settled once, by the first call that needs it. Raises\n"
             "ConfigError where the variable is not a number from 1 to 256.");

static PyObject *
batch_thread_count(PyObject *module, PyObject *ignored)
{
    arl_error_t err = ARL_ERROR_INIT;

    (void)ignored;
    if (arl_threads_prepare(&err) != ARL_OK) {
        return arl_raise(arl_state_from_module(module), &err);
    }
    return PyLong_FromLong(arl_threads_count());
}

#define BATCH_METHOD(name, flags, doc)                                                             \
    {                                                                                              \
#        name, (PyCFunction)(void (*)(void))batch_##name, flags, doc                               \
    }

PyMethodDef arl_batch_methods[] = {
    BATCH_METHOD(pad_prompt_response, METH_FASTCALL | METH_KEYWORDS, pad_doc),
    BATCH_METHOD(left_pad, METH_FASTCALL | METH_KEYWORDS, left_pad_doc),
    BATCH_METHOD(make_jagged, METH_FASTCALL | METH_KEYWORDS, make_jagged_doc),
    BATCH_METHOD(shift_predict_next, METH_O, shift_doc),
    BATCH_METHOD(thread_count, METH_NOARGS, thread_count_doc),
    {NULL, NULL, 0, NULL},
};

int
arl_batch_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
