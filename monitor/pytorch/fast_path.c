/* The ordinary way from torch's hooks to rows (see monitor/pytorch/fast_path.py).
 *
 * A tensor is ordinary if it is a dense tensor of floats whose series already has rows, in host memory, or on a device where one launch
 * reads it (`TorchTensorReader.launch`). Everything else is handed to the Python code, which is complete: each function here says when it
 * has not done the work, and has then changed nothing. Both work on the same state: the rows and cells of the table, the tensors that were
 * read, the hooks of a tensor.
 *
 * Only the stable ABI is used, so callables are objects with `tp_call`, and fields of Python objects are read by name. */

#include "fast_gradients.h"
#include "fast_graph.h"

/* --- A call of a module, before and after its forward. */

static PyObject *reader_begin_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        return PyErr_Format(PyExc_TypeError, "begin_call takes 5 arguments, not %zd", count);
    }
    Leaves inputs;
    inputs.count = 0;
    int64_t micro_step = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *answer = NULL;
    if (!find_leaves(args[0], args[1], &inputs)) {
        answer = Py_NewRef(Py_None);
    } else if (args[3] != Py_True || record_leaves((Reader *)self, &inputs, micro_step) == 0) {
        answer = args[4] != Py_True ? Py_NewRef(Py_True) : find_nodes(&inputs) ? find_targets(&inputs) : NULL;
        forget_failure();
        if (answer == NULL && !PyErr_Occurred()) { /* the targets are not ordinary: Python finds them */
            answer = Py_NewRef(Py_False);
        }
    }
    free_leaves(&inputs);
    return answer;
}

enum { NOT_WATCHED = 1, NOT_FOLLOWED = 2 };

static PyObject *reader_end_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 11 || !PyDict_Check(args[9])) {
        return PyErr_Format(PyExc_TypeError, "end_call takes 11 arguments, not %zd, and a dictionary of known nodes", count);
    }
    PyObject *targets = args[4];
    Watching of = {PyLong_AsUnsignedLongLong(args[5]), self, args[6], PyLong_AsLongLong(args[7]), PyLong_AsLongLong(args[8])};
    Leaves results;
    results.count = 0;
    if (PyErr_Occurred()) {
        return NULL;
    }
    int fits = find_leaves(args[0], args[1], &results), watched = DONE, followed = DONE;
    int failed = fits && args[2] == Py_True && record_leaves((Reader *)self, &results, of.micro_step) < 0;
    if (fits && !failed && args[3] == Py_True) {
        int known = find_nodes(&results);
        watched = known ? watch_results(&results, &of) : NOT_DONE;
        if (watched != FAILED && PyDict_Check(targets) && PyDict_Size(targets) > 0) {
            followed = known ? follow_inputs(&results, targets, args[9], &of, args[10]) : NOT_DONE;
        }
    }
    free_leaves(&results);
    if (failed || watched == FAILED || followed == FAILED) {
        return NULL;
    }
    if (!fits) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong((watched == DONE ? 0 : NOT_WATCHED) | (followed == DONE ? 0 : NOT_FOLLOWED));
}

static PyMethodDef READER_METHODS[] = {
    {"record", (PyCFunction)(void (*)(void))reader_record, METH_FASTCALL | METH_KEYWORDS, "See TensorReader."},
    {"record_ordinary", (PyCFunction)(void (*)(void))reader_record_ordinary, METH_FASTCALL, "record_ordinary(watched, x, micro_step, value)"},
    {"record_all", reader_record_all, METH_VARARGS, "See TensorReader."},
    {"arrivals", reader_arrivals, METH_VARARGS, "arrivals(watched, due, reductions, changes, parameter)"},
    {"begin_call", (PyCFunction)(void (*)(void))reader_begin_call, METH_FASTCALL,
     "begin_call(plan, values, micro_step, forward, graph)"},
    {"end_call", (PyCFunction)(void (*)(void))reader_end_call, METH_FASTCALL,
     "end_call(plan, result, forward, graph, targets, start, gate, step, micro_step, known, several)"},
    {"_share", reader_share, METH_VARARGS, "_share(table, layouts, seen, most_seen, device, lock, read, even): the state of the reader in Python"},
    {"_measure", reader_measure, METH_VARARGS, "_measure(narrow, wide, higher, check_sums, magnitudes, ready)"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef READER_MEMBERS[] = {
    {"ready", T_INT, offsetof(Reader, ready), READONLY, "Whether ordinary tensors are recorded in C."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot READER_SLOTS[] = {{Py_tp_new, PyType_GenericNew},
                                     {Py_tp_dealloc, reader_dealloc},
                                     {Py_tp_methods, READER_METHODS},
                                     {Py_tp_members, READER_MEMBERS},
                                     {0, NULL}};
static PyType_Spec READER = {"monitor.pytorch._fast_path.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, READER_SLOTS};

/* --- The module. */

static PyObject *set_up(PyObject *module, PyObject *args) {
    PyObject *capsule;
    (void)module;
    if (!PyArg_ParseTuple(
            args, "OOOOOOOOO", &capsule, &tensor_type, &parameter_type, &accumulation, &forwarding, &is_lazy_copy, &current_sequence_nr,
            &current_backward, &new_hooks)) {
        return NULL;
    }
    const DLPackExchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    kernel = found == NULL ? NULL : PyCapsule_Import(KERNEL_CAPSULE, 0);
    if (kernel == NULL) {
        return NULL;
    }
    PyObject *kept[] = {
        capsule, tensor_type, parameter_type, accumulation, forwarding, is_lazy_copy, current_sequence_nr, current_backward, new_hooks};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        Py_INCREF(kept[i]); /* for as long as the process lives */
    }
    exchange = found->major == DL_MAJOR && found->dltensor_from_py_object_no_sync != NULL ? found : NULL;
    return PyBool_FromLong(exchange != NULL);
}

static PyMethodDef METHODS[] = {
    {"set_up", set_up, METH_VARARGS,
     "set_up(exchange, Tensor, Parameter, AccumulateGrad, forwarding, is_lazy_copy, sequence_nr, backward, new_hooks) -> whether it can be used"},
    {NULL, NULL, 0, NULL},
};

#define INTERN(name) && (s_##name = PyUnicode_InternFromString(#name)) != NULL

static int prepare(PyObject *module) {
    if (!(1 NAMES(INTERN)) || PyModule_AddIntConstant(module, "MOST_LEAVES", MOST_LEAVES) < 0 ||
        PyModule_AddStringConstant(module, "KERNEL", KERNEL_NAME) < 0) {
        return -1;
    }
    PyObject *reader = PyType_FromSpec(&READER);
    read_tensor_type = (PyTypeObject *)PyType_FromSpec(&READ_TENSOR);
    writer_type = (PyTypeObject *)PyType_FromSpec(&WRITER);
    arrivals_type = (PyTypeObject *)PyType_FromSpec(&ARRIVALS);
    int failed = reader == NULL || read_tensor_type == NULL || writer_type == NULL || arrivals_type == NULL ||
                 PyModule_AddType(module, (PyTypeObject *)reader) < 0 || PyModule_AddType(module, read_tensor_type) < 0;
    Py_XDECREF(reader);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, prepare}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_fast_path", "The ordinary way from torch's hooks to rows.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast_path(void) {
    return PyModuleDef_Init(&MODULE);
}
