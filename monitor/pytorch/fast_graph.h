/* The tensors of a call, the hooks on their gradients, and the search for those of inputs. Part of fast_path.c. */

#ifndef MONITOR_FAST_GRAPH_H
#define MONITOR_FAST_GRAPH_H

#include "fast_lists.h"

/* --- Structures of arguments and results, as plans. An entry of a plan describes one value:
 *
 *   a tuple   a container: its class, and the entry of each item
 *   a class   a value of exactly this class, in which there is no tensor of interest
 *   a list    a plain tensor: its series, and that of its gradient; None for one that is not recorded */

#define MOST_LEAVES 64

typedef struct {
    PyObject *x, *recorded, *gradient;
    PyObject *node; /* that made `x`; NULL if autograd does not follow `x` */
} Leaf;

typedef struct {
    Leaf leaves[MOST_LEAVES];
    int count;
} Leaves;

/* Finds the tensors of a value. 0: it does not fit the plan. The caller frees them in either case: Python code runs while they are
 * recorded, and may change a list that holds them. */
static int find_leaves(PyObject *entry, PyObject *value, Leaves *found) {
    if (PyList_Check(entry)) {
        if (!is_plain(value) || found->count == MOST_LEAVES || PyList_Size(entry) != 2) {
            return 0;
        }
        PyObject *recorded = PyList_GetItem(entry, 0), *gradient = PyList_GetItem(entry, 1);
        found->leaves[found->count++] = (Leaf){Py_NewRef(value), Py_NewRef(recorded), Py_NewRef(gradient), NULL};
        return 1;
    }
    if (!PyTuple_Check(entry)) {
        return (PyObject *)Py_TYPE(value) == entry;
    }
    Py_ssize_t items = PyTuple_Size(entry) - 1, length;
    if (items < 0 || (PyObject *)Py_TYPE(value) != PyTuple_GetItem(entry, 0)) {
        return 0;
    }
    int is_tuple = PyTuple_Check(value);
    if (!is_tuple && !PyList_Check(value)) {
        return 0;
    }
    length = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
    int fits = length == items;
    for (Py_ssize_t i = 0; fits && i < items; i++) {
        PyObject *item = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
        fits = find_leaves(PyTuple_GetItem(entry, i + 1), item, found);
    }
    return fits;
}

/* Records the tensors in their order. -1, with an exception set, if one could not be read. */
static int record_leaves(Reader *reader, const Leaves *found, int64_t micro_step) {
    for (int i = 0; i < found->count; i++) {
        const Leaf *leaf = &found->leaves[i];
        if (leaf->recorded != Py_None && record_any(reader, leaf->recorded, leaf->x, micro_step, Py_True) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Finds the node of each tensor that autograd follows. 0: one is a leaf of the graph, or cannot be asked. */
static int find_nodes(Leaves *found) {
    for (int i = 0; i < found->count; i++) {
        Leaf *leaf = &found->leaves[i];
        PyObject *followed = PyObject_GetAttr(leaf->x, s_requires_grad);
        if (followed == Py_True) {
            leaf->node = PyObject_GetAttr(leaf->x, s_grad_fn);
        }
        int lost = followed == NULL || (followed == Py_True && (leaf->node == NULL || leaf->node == Py_None));
        Py_XDECREF(followed);
        if (lost) {
            Py_CLEAR(leaf->node);
            forget_failure();
            return 0;
        }
    }
    return 1;
}

static void free_leaves(Leaves *found) {
    for (int i = 0; i < found->count; i++) {
        Py_XDECREF(found->leaves[i].node);
        Py_DECREF(found->leaves[i].gradient);
        Py_DECREF(found->leaves[i].recorded);
        Py_DECREF(found->leaves[i].x);
    }
}

/* --- The hook that records a gradient: on a tensor, or on edge `k` of a node. It raises nothing into training. */

typedef struct {
    PyObject_HEAD
    PyObject *reader, *watched, *gate;
    int64_t step, micro_step;
    Py_ssize_t k; /* -1 on a tensor */
} Writer;

enum { ON_TENSOR = -1 };

static PyObject *new_writer(PyObject *reader, PyObject *watched, PyObject *gate, int64_t step, int64_t micro_step, Py_ssize_t k) {
    Writer *made = (Writer *)PyType_GenericAlloc(writer_type, 0);
    if (made != NULL) {
        made->reader = Py_NewRef(reader);
        made->watched = Py_NewRef(watched);
        made->gate = Py_NewRef(gate);
        made->step = step;
        made->micro_step = micro_step;
        made->k = k;
    }
    return (PyObject *)made;
}

static void writer_dealloc(PyObject *self) {
    Writer *writer = (Writer *)self;
    Py_XDECREF(writer->reader);
    Py_XDECREF(writer->watched);
    Py_XDECREF(writer->gate);
    free_object(self);
}

/* Whether gradients of the writer's step are recorded now. */
static int is_open(const Writer *writer) {
    PyObject *clock = PyObject_GetAttr(writer->gate, s_clock);
    PyObject *recorder = clock == NULL ? NULL : PyObject_GetAttr(writer->gate, s_recorder);
    int open = recorder != NULL && number(PyObject_GetAttr(clock, s_step)) == writer->step && is_true(recorder, s_active);
    Py_XDECREF(clock);
    Py_XDECREF(recorder);
    forget_failure();
    return open;
}

static PyObject *writer_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    Writer *writer = (Writer *)self;
    PyObject *gradient = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    (void)kwargs;
    if (gradient != NULL && writer->k >= 0) { /* a list in compiled autograd */
        gradient = PyTuple_Check(gradient) ? PyTuple_GetItem(gradient, writer->k)
                   : PyList_Check(gradient) ? PyList_GetItem(gradient, writer->k)
                                            : NULL;
    }
    forget_failure();
    if (gradient == NULL || gradient == Py_None || !is_true(writer->gate, s_attached)) {
        Py_RETURN_NONE;
    }
    if (is_open(writer) && record_one((Reader *)writer->reader, writer->watched, gradient, writer->micro_step, 1, NULL) == DONE) {
        Py_RETURN_NONE;
    }
    forget_failure(); /* `take` repeats and reports it */
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyObject_CallMethod(writer->gate, "take", "OOLL", writer->watched, gradient, (long long)writer->step, (long long)writer->micro_step);
}

static PyType_Slot WRITER_SLOTS[] = {{Py_tp_dealloc, writer_dealloc}, {Py_tp_call, writer_call}, {0, NULL}};
static PyType_Spec WRITER = {
    "monitor.pytorch._fast_path.GradientWriter", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, WRITER_SLOTS};

/* --- The graph of a call. */

/* The targets of the recorded gradients of inputs, each with the series: {(node, number of its output): series}. NULL, perhaps
 * without an exception, if they are not ordinary: two arguments with one gradient have a joint name. */
static PyObject *find_targets(const Leaves *inputs) {
    PyObject *targets = PyDict_New(), *all = PySet_New(NULL);
    for (int i = 0; targets != NULL && i < inputs->count; i++) {
        const Leaf *leaf = &inputs->leaves[i];
        if (leaf->node == NULL) {
            continue;
        }
        PyObject *output_nr = PyObject_GetAttr(leaf->x, s_output_nr);
        PyObject *target = output_nr == NULL ? NULL : PyTuple_Pack(2, leaf->node, output_nr);
        int done = target != NULL && all != NULL && PySet_Contains(all, target) == 0 && PySet_Add(all, target) == 0;
        if (!done || (leaf->gradient != Py_None && PyDict_SetItem(targets, target, leaf->gradient) < 0)) {
            Py_CLEAR(targets);
        }
        Py_XDECREF(target);
        Py_XDECREF(output_nr);
    }
    Py_XDECREF(all);
    return targets;
}

/* Of the hooks of a call: the first sequence number of its nodes, and what a writer needs. */
typedef struct {
    uint64_t start;
    PyObject *reader, *gate;
    int64_t step, micro_step;
} Watching;

/* Whether the call has made all of its results. Then hooks on them end with its graph. */
static int are_made_here(const Leaves *results, uint64_t start) {
    for (int i = 0; i < results->count; i++) {
        PyObject *node = results->leaves[i].node;
        if (node != NULL && results->leaves[i].gradient != Py_None && (sequence_number(node) < start || PyErr_Occurred())) {
            forget_failure();
            return 0;
        }
    }
    return 1;
}

/* Registers a hook as Tensor.register_hook does, without a handle: it is never removed. */
static int watch_gradient(const Leaf *leaf, const Watching *of) {
    PyObject *hooks = PyObject_GetAttr(leaf->x, s__backward_hooks);
    PyObject *writer = hooks == NULL ? NULL : new_writer(of->reader, leaf->gradient, of->gate, of->step, of->micro_step, ON_TENSOR);
    int failed = writer == NULL;
    if (!failed && hooks != Py_None) {
        failed = PyObject_SetItem(hooks, writer, writer) < 0;
    } else if (!failed) {
        Py_DECREF(hooks);
        hooks = PyObject_CallNoArgs(new_hooks);
        failed = hooks == NULL || PyObject_SetItem(hooks, writer, writer) < 0 || PyObject_SetAttr(leaf->x, s__backward_hooks, hooks) < 0;
        PyObject *called = failed ? NULL : PyObject_CallMethodObjArgs(leaf->node, s__register_hook_dict, leaf->x, NULL);
        failed = called == NULL;
        Py_XDECREF(called);
    }
    Py_XDECREF(writer);
    Py_XDECREF(hooks);
    return failed ? FAILED : DONE;
}

static int watch_results(const Leaves *results, const Watching *of) {
    int done = are_made_here(results, of->start) ? DONE : NOT_DONE;
    for (int i = 0; done == DONE && i < results->count; i++) {
        if (results->leaves[i].node != NULL && results->leaves[i].gradient != Py_None) {
            done = watch_gradient(&results->leaves[i], of);
        }
    }
    return done;
}

typedef struct {
    PyObject *found, *nodes, *stack; /* edges by target; nodes of the targets; nodes to visit */
    PyObject *known;                 /* sequence number and edges of nodes that calls within this one have visited */
    uint64_t start, end;
} Walk;

#define MOST_KNOWN 16384 /* nodes: forgetting them costs a second look, no more */

/* The sequence number of a node, and its edges: a new reference, NULL if they are not to be had. */
static PyObject *edges_of(Walk *walk, PyObject *node, uint64_t *at) {
    PyObject *entry = PyDict_GetItemWithError(walk->known, node);
    if (entry != NULL) {
        *at = PyLong_AsUnsignedLongLong(PyTuple_GetItem(entry, 0));
        return Py_NewRef(PyTuple_GetItem(entry, 1));
    }
    PyObject *numbered = PyObject_CallMethodObjArgs(node, s__sequence_nr, NULL);
    PyObject *edges = numbered == NULL ? NULL : PyObject_GetAttr(node, s_next_functions);
    entry = edges == NULL || !PyTuple_Check(edges) ? NULL : PyTuple_Pack(2, numbered, edges);
    if (entry != NULL) {
        *at = PyLong_AsUnsignedLongLong(numbered);
        if (PyDict_Size(walk->known) >= MOST_KNOWN) {
            PyDict_Clear(walk->known);
        }
        if (PyDict_SetItem(walk->known, node, entry) < 0) {
            Py_CLEAR(edges);
        }
    } else {
        Py_CLEAR(edges);
    }
    Py_XDECREF(entry);
    Py_XDECREF(numbered);
    return edges;
}

/* Follows one node: its edges into targets are entered, the other nodes behind it are to be visited. */
static int walk_node(Walk *walk, PyObject *node) {
    uint64_t at = 0;
    PyObject *edges = edges_of(walk, node, &at);
    if (edges == NULL || PyErr_Occurred()) {
        Py_XDECREF(edges);
        return PyErr_Occurred() ? FAILED : NOT_DONE;
    }
    int done = at < walk->start || (at >= walk->end && at != (uint64_t)-1) ? NOT_DONE : DONE; /* it may belong to another thread */
    for (Py_ssize_t k = 0; done == DONE && k < PyTuple_Size(edges); k++) {
        PyObject *edge = PyTuple_GetItem(edges, k), *following = PyTuple_GetItem(edge, 0), *into;
        if (following == Py_None) {
            continue;
        }
        int target = PySet_Contains(walk->nodes, following);
        if (target == 0 && (PyObject *)Py_TYPE(following) != accumulation) { /* behind an accumulation there is nothing */
            done = PyList_Append(walk->stack, following) < 0 ? FAILED : DONE;
        } else if (target > 0 && (into = PyDict_GetItemWithError(walk->found, edge)) != NULL) {
            PyObject *one = Py_BuildValue("(On)", node, k);
            done = (PyObject *)Py_TYPE(node) == forwarding ? NOT_DONE : one == NULL || PyList_Append(into, one) < 0 ? FAILED : DONE;
            Py_XDECREF(one);
        }
        done = PyErr_Occurred() ? FAILED : done;
    }
    Py_XDECREF(edges);
    return PyErr_Occurred() ? FAILED : done;
}

static int walk_all(Walk *walk) {
    PyObject *visited = PySet_New(walk->nodes);
    int done = visited == NULL ? FAILED : DONE;
    Py_ssize_t left;
    while (done == DONE && (left = PyList_Size(walk->stack)) > 0) {
        PyObject *node = Py_NewRef(PyList_GetItem(walk->stack, left - 1));
        int known = PyList_SetSlice(walk->stack, left - 1, left, NULL) < 0 ? -1 : PySet_Contains(visited, node);
        if (known == 0) {
            done = PySet_Add(visited, node) < 0 ? FAILED : walk_node(walk, node);
        } else if (known < 0) {
            done = FAILED;
        }
        Py_DECREF(node);
    }
    Py_XDECREF(visited);
    return done;
}

static int enter_targets(Walk *walk, PyObject *targets) {
    PyObject *target;
    Py_ssize_t place = 0;
    while (PyDict_Next(targets, &place, &target, NULL)) {
        PyObject *edges = PyList_New(0);
        int entered = edges != NULL && PyDict_SetItem(walk->found, target, edges) == 0 && PySet_Add(walk->nodes, PyTuple_GetItem(target, 0)) == 0;
        Py_XDECREF(edges);
        if (!entered) {
            return FAILED;
        }
    }
    return DONE;
}

/* Has the gradients recorded that nodes of the call pass to its inputs: by a hook on the node, or by `several` for several edges. */
static int watch_edges(const Walk *walk, PyObject *targets, const Watching *of, PyObject *several) {
    PyObject *target, *edges;
    Py_ssize_t place = 0;
    int done = DONE;
    while (done == DONE && PyDict_Next(walk->found, &place, &target, &edges)) {
        PyObject *watched = PyDict_GetItemWithError(targets, target), *called = NULL, *writer;
        Py_ssize_t count = PyList_Size(edges);
        if (watched == NULL || count == 0) {
            continue;
        }
        PyObject *edge = PyList_GetItem(edges, 0);
        Py_ssize_t k = count > 1 ? ON_TENSOR : PyLong_AsSsize_t(PyTuple_GetItem(edge, 1));
        if ((writer = new_writer(of->reader, watched, of->gate, of->step, of->micro_step, k)) != NULL) {
            called = count > 1 ? PyObject_CallFunctionObjArgs(several, target, edges, writer, NULL)
                               : PyObject_CallMethodObjArgs(PyTuple_GetItem(edge, 0), s_register_hook, writer, NULL);
        }
        done = called == NULL ? FAILED : DONE;
        Py_XDECREF(called);
        Py_XDECREF(writer);
    }
    return PyErr_Occurred() ? FAILED : done;
}

static int follow_inputs(const Leaves *results, PyObject *targets, PyObject *known, const Watching *of, PyObject *several) {
    Walk walk = {PyDict_New(), PySet_New(NULL), PyList_New(0), known, of->start, 0};
    int done = walk.found != NULL && walk.nodes != NULL && walk.stack != NULL ? enter_targets(&walk, targets) : FAILED;
    for (int i = 0; done == DONE && i < results->count; i++) {
        PyObject *node = results->leaves[i].node;
        done = node == NULL || PyList_Append(walk.stack, node) == 0 ? DONE : FAILED;
    }
    if (done == DONE) {
        /* Asked now: for some views, asking for the node has made one. */
        PyObject *now = PyObject_CallNoArgs(current_sequence_nr);
        walk.end = now == NULL ? 0 : PyLong_AsUnsignedLongLong(now);
        Py_XDECREF(now);
        done = PyErr_Occurred() ? FAILED : walk_all(&walk);
    }
    if (done == DONE) {
        done = watch_edges(&walk, targets, of, several);
    }
    Py_XDECREF(walk.found);
    Py_XDECREF(walk.nodes);
    Py_XDECREF(walk.stack);
    return done;
}

#endif
