/* Gradients of parameters, when a backward has added to them. Part of fast_path.c. */

#ifndef MONITOR_FAST_GRADIENTS_H
#define MONITOR_FAST_GRADIENTS_H

#include "fast_rows.h"

/* One parameter. What refers to the model is referenced weakly: Python's garbage collector does not see references of hooks. */
typedef struct {
    PyObject_HEAD
    PyObject *reader, *watched, *due;
    PyObject *reductions, *changes, *parameter; /* weak references */
} Arrivals;

static PyTypeObject *arrivals_type;

/* arrivals(watched, due, reductions, changes, parameter) */
static PyObject *reader_arrivals(PyObject *self, PyObject *args) {
    PyObject *watched, *due, *reductions, *changes, *parameter;
    if (!PyArg_ParseTuple(args, "OOOOO", &watched, &due, &reductions, &changes, &parameter)) {
        return NULL;
    }
    Arrivals *made = (Arrivals *)PyType_GenericAlloc(arrivals_type, 0);
    if (made == NULL) {
        return NULL;
    }
    made->reader = Py_NewRef(self);
    made->watched = Py_NewRef(watched);
    made->due = Py_NewRef(due);
    made->reductions = PyWeakref_NewRef(reductions, NULL);
    made->changes = PyWeakref_NewRef(changes, NULL);
    made->parameter = PyWeakref_NewRef(parameter, NULL);
    if (made->reductions == NULL || made->changes == NULL || made->parameter == NULL) {
        Py_DECREF(made);
        return NULL;
    }
    return (PyObject *)made;
}

static void arrivals_dealloc(PyObject *self) {
    Arrivals *of = (Arrivals *)self;
    Py_XDECREF(of->reader);
    Py_XDECREF(of->watched);
    Py_XDECREF(of->due);
    Py_XDECREF(of->reductions);
    Py_XDECREF(of->changes);
    Py_XDECREF(of->parameter);
    free_object(self);
}

/* Whether the gradients of the backward in progress are only to be read. */
static int are_only_read(const Arrivals *of) {
    PyObject *reductions = PyWeakref_GetObject(of->reductions);
    int64_t backward = number(PyObject_GetAttr(reductions, s_only_read)); /* no backward has number -1 */
    return backward >= 0 && number(PyObject_CallNoArgs(current_backward)) == backward;
}

/* take(tensor): True if nothing is left to do */
static PyObject *arrivals_take(PyObject *self, PyObject *x) {
    Arrivals *of = (Arrivals *)self;
    PyObject *gradient = NULL;
    int done = !is_true(of->due, s_now);
    if (!done && are_only_read(of) && (gradient = PyObject_GetAttr(x, s_grad)) != NULL && gradient != Py_None) {
        done = record_one((Reader *)of->reader, of->watched, gradient, 0, 0, NULL) == DONE &&
               PyObject_SetAttr(PyWeakref_GetObject(of->changes), s_latest, PyWeakref_GetObject(of->parameter)) == 0;
    }
    Py_XDECREF(gradient);
    forget_failure();
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

static PyMethodDef ARRIVALS_METHODS[] = {{"take", arrivals_take, METH_O, "See fast_path.py."}, {NULL, NULL, 0, NULL}};
static PyType_Slot ARRIVALS_SLOTS[] = {{Py_tp_dealloc, arrivals_dealloc}, {Py_tp_methods, ARRIVALS_METHODS}, {0, NULL}};
static PyType_Spec ARRIVALS = {
    "monitor.pytorch._fast_path.Arrivals", sizeof(Arrivals), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ARRIVALS_SLOTS};

#endif
