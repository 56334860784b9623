/* What torch offers, and a look at a tensor. Part of fast_path.c. */

#ifndef MONITOR_FAST_TENSORS_H
#define MONITOR_FAST_TENSORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#include "../stats/host_kernel.h"

enum { NOT_DONE = 0, DONE = 1, FAILED = -1 }; /* FAILED: with an exception set */

/* --- What torch offers: DLPack's exchange of tensors between C libraries, version 1, as far as it is used. */

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* owned by the tensor */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *earlier;
    void (*not_used[3])(void);
    int (*dltensor_from_py_object_no_sync)(void *tensor, DLTensor *found);
} DLPackExchange;

enum { DL_CPU = 1, DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

static const DLPackExchange *exchange; /* NULL until `set_up` */
static PyObject *tensor_type, *parameter_type, *accumulation, *forwarding, *is_lazy_copy, *new_hooks;
static PyObject *current_sequence_nr, *current_backward; /* functions */

#define NAMES(EACH)                                                                                                                      \
    EACH(_backward_hooks) EACH(_local_tensor) EACH(_register_hook_dict) EACH(_sequence_nr) EACH(_version) EACH(active)                   \
    EACH(attached) EACH(captures) EACH(checked) EACH(clock) EACH(device) EACH(dtype) EACH(get_device) EACH(grad) EACH(grad_fn)           \
    EACH(is_cpu) EACH(is_neg) EACH(latest) EACH(launch_all) EACH(layout_of) EACH(native) EACH(nbytes) EACH(next_functions) EACH(now)     \
    EACH(only_read) EACH(output_nr) EACH(page) EACH(record_all_in_python) EACH(record_in_python) EACH(recorder) EACH(register_hook)      \
    EACH(requires_grad) EACH(shape) EACH(slots) EACH(step) EACH(storage_offset) EACH(take) EACH(untyped_storage)
#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

/* Drops a failure, which the Python code repeats and reports. An interrupt stays: it is training's. */
static void forget_failure(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
}

static int is_plain(PyObject *x) {
    return (PyObject *)Py_TYPE(x) == tensor_type || (PyObject *)Py_TYPE(x) == parameter_type;
}

/* Whether the attribute is True. An error counts as no. */
static int is_true(PyObject *of, PyObject *name) {
    PyObject *found = PyObject_GetAttr(of, name);
    int yes = found == Py_True;
    if (found == NULL) {
        forget_failure();
    }
    Py_XDECREF(found);
    return yes;
}

/* The number that an attribute holds, or a method returns. -1, with an exception set, if there is none. */
static int64_t number(PyObject *found) {
    int64_t value = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return value;
}

static uint64_t sequence_number(PyObject *node) {
    PyObject *found = PyObject_CallMethodObjArgs(node, s__sequence_nr, NULL);
    uint64_t value = found == NULL ? (uint64_t)-1 : PyLong_AsUnsignedLongLong(found);
    Py_XDECREF(found);
    return value;
}

/* --- Looking at a tensor. */

#define MOST_DIMENSIONS 8

typedef struct {
    const void *data;
    int device; /* torch's index; -1 for host memory */
    size_t count;
    enum format format;
    int64_t layout[MOST_DIMENSIONS + 2]; /* format, number of dimensions, shape: the key of a layout */
    int numbers;                         /* used in `layout` */
} Elements;

static const int64_t WIDTH[FORMATS] = {4, 8, 2, 2, 8};

static int format_of(const DLTensor *x) {
    if (x->lanes != 1) {
        return -1;
    }
    if (x->code == DL_BFLOAT && x->bits == 16) {
        return BFLOAT16;
    }
    if (x->code == DL_INT && x->bits == 64 && x->device_type == DL_CPU) {
        return INT64;
    }
    return x->code != DL_FLOAT ? -1 : x->bits == 32 ? FLOAT32 : x->bits == 64 ? FLOAT64 : x->bits == 16 ? FLOAT16 : -1;
}

/* Whether the storage holds all elements: it may have been freed or cut. */
static int is_in_storage(PyObject *x, int64_t bytes, int64_t width) {
    PyObject *storage = PyObject_CallMethodObjArgs(x, s_untyped_storage, NULL);
    int64_t held = storage == NULL ? -1 : number(PyObject_CallMethodObjArgs(storage, s_nbytes, NULL));
    int64_t before = held < bytes ? -1 : number(PyObject_CallMethodObjArgs(x, s_storage_offset, NULL));
    Py_XDECREF(storage);
    return before >= 0 && before * width + bytes <= held;
}

static int answers_no(PyObject *answer) {
    int no = answer == Py_False;
    Py_XDECREF(answer);
    return no;
}

/* Fills `found` with the elements of an ordinary tensor, in memory without gaps, of any device. Leaves no failure. */
static int look(PyObject *x, Elements *found) {
    DLTensor seen;
    int64_t count = 1;
    if (!is_plain(x) || !answers_no(PyObject_CallFunctionObjArgs(is_lazy_copy, x, NULL)) || /* the exchange would make the copy */
        exchange->dltensor_from_py_object_no_sync(x, &seen) < 0) {
        forget_failure();
        return 0;
    }
    int format = format_of(&seen);
    if (seen.data == NULL || format < 0 || seen.ndim > MOST_DIMENSIONS) {
        return 0;
    }
    for (int d = seen.ndim - 1; d >= 0; d--) {
        if (seen.strides != NULL && seen.shape[d] != 1 && seen.strides[d] != count) {
            return 0;
        }
        count *= seen.shape[d];
        found->layout[2 + d] = seen.shape[d];
    }
    if (count == 0 || !is_in_storage(x, count * WIDTH[format], WIDTH[format]) ||
        !answers_no(PyObject_CallMethodObjArgs(x, s_is_neg, NULL))) { /* a flag that the exchange ignores */
        forget_failure();
        return 0;
    }
    found->data = (const char *)seen.data + seen.byte_offset;
    found->device = -1;
    if (seen.device_type != DL_CPU) { /* DLPack's number of a device is not torch's everywhere */
        found->device = (int)number(PyObject_CallMethodObjArgs(x, s_get_device, NULL));
        if (found->device < 0) {
            forget_failure();
            return 0;
        }
    }
    found->count = (size_t)count;
    found->format = found->layout[0] = format;
    found->layout[1] = seen.ndim;
    found->numbers = seen.ndim + 2;
    return 1;
}

#endif
