/* The ordinary way from torch's hooks to rows (see monitor/pytorch/fast_path.py).
 *
 * A tensor is ordinary if it is a dense tensor of floats in host memory, whose series already has rows. Everything else is handed to
 * the Python code, which is complete: each function here says when it has not done the work, and has then changed nothing. Both work
 * on the same state: the rows and cells of the table, the tensors that were read, the hooks of a tensor.
 *
 * Only the stable ABI is used, so callables are objects with `tp_call`, and fields of Python objects are read by name. */

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

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };

static const DLPackExchange *exchange; /* NULL until `set_up` */
static PyObject *tensor_type, *parameter_type, *accumulation, *forwarding, *is_lazy_copy, *current_sequence_nr, *new_hooks;

#define NAMES(EACH)                                                                                                                      \
    EACH(_backward_hooks) EACH(_register_hook_dict) EACH(_sequence_nr) EACH(_version) EACH(active) EACH(attached) EACH(checked)          \
    EACH(clock) EACH(dtype) EACH(grad_fn) EACH(is_neg) EACH(layout_of) EACH(native) EACH(nbytes) EACH(next_functions) EACH(output_nr)    \
    EACH(record_all_in_python) EACH(record_in_python) EACH(recorder) EACH(register_hook) EACH(requires_grad) EACH(shape) EACH(slots) EACH(step)              \
    EACH(storage_offset) EACH(take) EACH(untyped_storage)
#define DECLARE(name) static PyObject *s_##name;
NAMES(DECLARE)

static int is_plain(PyObject *x) {
    return (PyObject *)Py_TYPE(x) == tensor_type || (PyObject *)Py_TYPE(x) == parameter_type;
}

/* Whether the attribute is True. An error counts as no. */
static int is_true(PyObject *of, PyObject *name) {
    PyObject *found = PyObject_GetAttr(of, name);
    int yes = found == Py_True;
    if (found == NULL) {
        PyErr_Clear();
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
    size_t count;
    enum format format;
    int64_t layout[MOST_DIMENSIONS + 2]; /* format, number of dimensions, shape: the key of a layout */
    int numbers;                         /* used in `layout` */
} Elements;

static const int64_t WIDTH[FORMATS] = {4, 8, 2, 2};

static int format_of(const DLTensor *x) {
    if (x->lanes != 1) {
        return -1;
    }
    if (x->code == DL_BFLOAT && x->bits == 16) {
        return BFLOAT16;
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

/* Fills `found` with the elements of an ordinary tensor, in memory without gaps. Leaves no exception. */
static int look(PyObject *x, Elements *found) {
    DLTensor seen;
    int64_t count = 1;
    if (!is_plain(x) || !answers_no(PyObject_CallFunctionObjArgs(is_lazy_copy, x, NULL)) || /* the exchange would make the copy */
        exchange->dltensor_from_py_object_no_sync(x, &seen) < 0) {
        PyErr_Clear();
        return 0;
    }
    int format = format_of(&seen);
    if (seen.device_type != DL_CPU || seen.data == NULL || format < 0 || seen.ndim > MOST_DIMENSIONS) {
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
        PyErr_Clear();
        return 0;
    }
    found->data = (const char *)seen.data + seen.byte_offset;
    found->count = (size_t)count;
    found->format = found->layout[0] = format;
    found->layout[1] = seen.ndim;
    found->numbers = seen.ndim + 2;
    return 1;
}

/* --- A tensor that was read: what `TorchTensorReader` remembers to recognise it under another name.
 *
 * No type of this module takes part in garbage collection: thousands of objects that live until the end of a step would make it run.
 * None of them refers to a module or a graph, so there are no cycles. */

typedef struct {
    PyObject_HEAD
    PyObject *tensor, *version; /* a weak reference; an int, or a tuple of compiled code */
    int64_t row, layout;
} ReadTensor;

static PyTypeObject *read_tensor_type, *writer_type;

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *new_read_tensor(PyObject *x, PyObject *version, int64_t row, int64_t layout) {
    PyObject *weak = PyWeakref_NewRef(x, NULL);
    ReadTensor *made = weak == NULL ? NULL : (ReadTensor *)PyType_GenericAlloc(read_tensor_type, 0);
    if (made == NULL) {
        Py_XDECREF(weak);
        return NULL;
    }
    made->tensor = weak;
    made->version = Py_NewRef(version);
    made->row = row;
    made->layout = layout;
    return (PyObject *)made;
}

static PyObject *read_tensor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *x, *version;
    long long row, layout;
    (void)type;
    (void)kwargs;
    return PyArg_ParseTuple(args, "OOLL", &x, &version, &row, &layout) ? new_read_tensor(x, version, row, layout) : NULL;
}

static void read_tensor_dealloc(PyObject *self) {
    Py_XDECREF(((ReadTensor *)self)->tensor);
    Py_XDECREF(((ReadTensor *)self)->version);
    free_object(self);
}

static PyMemberDef READ_TENSOR_MEMBERS[] = {
    {"tensor", T_OBJECT_EX, offsetof(ReadTensor, tensor), READONLY, "A weak reference."},
    {"version", T_OBJECT_EX, offsetof(ReadTensor, version), READONLY, "Its version when it was read."},
    {"row", T_LONGLONG, offsetof(ReadTensor, row), READONLY, "Its row."},
    {"layout", T_LONGLONG, offsetof(ReadTensor, layout), READONLY, "Its layout."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot READ_TENSOR_SLOTS[] = {
    {Py_tp_new, read_tensor_new}, {Py_tp_dealloc, read_tensor_dealloc}, {Py_tp_members, READ_TENSOR_MEMBERS}, {0, NULL}};
static PyType_Spec READ_TENSOR = {"monitor.pytorch._fast_path.ReadTensor", sizeof(ReadTensor), 0, Py_TPFLAGS_DEFAULT, READ_TENSOR_SLOTS};

/* --- The reader: the base class of `TorchTensorReader`. */

#define MOST_READ 8192 /* tensors that are remembered: forgetting one costs a second read, no more */

typedef struct {
    PyObject_HEAD
    PyObject *table, *layouts, *seen, *device, *acquire, *release; /* `layouts`: index of each layout, by its key */
    PyObject *known;                                                 /* nodes of calls in progress: see `Walk` */
    double narrow, wide;                                             /* bounds below which elements count as zeros */
    int wanted, ready;
} Reader;

typedef struct {
    double *numbers;
    int64_t row, rows;
} Slot; /* RowSlot.native */

typedef struct {
    int64_t *order, *layout, *alias, *alias_order, *writes;
} Cells; /* StatsTable.native */

static const struct host_kernel *kernel;

static int copy_native(PyObject *of, void *to, Py_ssize_t size) {
    PyObject *found = of == NULL ? NULL : PyObject_GetAttr(of, s_native);
    int fits = found != NULL && PyBytes_Check(found) && PyBytes_Size(found) == size;
    if (fits) {
        memcpy(to, PyBytes_AsString(found), (size_t)size);
    }
    Py_XDECREF(found);
    PyErr_Clear();
    return fits;
}

static int find_slot(Reader *reader, PyObject *watched, int64_t micro_step, Slot *slot) {
    PyObject *slots = PyObject_GetAttr(watched, s_slots);
    PyObject *found = slots == NULL ? NULL : PyDict_GetItemWithError(slots, reader->device);
    int there = copy_native(found, slot, sizeof *slot) && micro_step >= 0 && micro_step < slot->rows;
    Py_XDECREF(slots);
    PyErr_Clear();
    return there;
}

/* The index of the layout of `x`; -1, with an exception set, if it cannot be found. */
static int64_t layout_index(Reader *reader, PyObject *x, const Elements *elements) {
    PyObject *key = PyBytes_FromStringAndSize((const char *)elements->layout, (Py_ssize_t)sizeof(int64_t) * elements->numbers);
    PyObject *index = key == NULL ? NULL : PyDict_GetItemWithError(reader->layouts, key);
    int64_t found = -1;
    if (index != NULL) {
        found = PyLong_AsLongLong(index);
    } else if (key != NULL && !PyErr_Occurred()) {
        PyObject *shape = PyObject_GetAttr(x, s_shape), *dtype = shape == NULL ? NULL : PyObject_GetAttr(x, s_dtype);
        index = dtype == NULL ? NULL : PyObject_CallMethodObjArgs(reader->table, s_layout_of, shape, dtype, NULL);
        if (index != NULL && PyDict_SetItem(reader->layouts, key, index) == 0) {
            found = PyLong_AsLongLong(index);
        }
        Py_XDECREF(shape);
        Py_XDECREF(dtype);
        Py_XDECREF(index);
    }
    Py_XDECREF(key);
    return found;
}

static void note(const Cells *cells, int64_t row, int64_t layout, int64_t alias) {
    cells->order[row] = ++*cells->writes;
    cells->layout[row] = layout;
    cells->alias[row] = alias;
    if (alias >= 0) {
        cells->alias_order[row] = cells->order[alias];
    }
}

/* The entry for `x`, if it is unchanged since it was read; borrowed. */
static ReadTensor *read_before(Reader *reader, PyObject *x, PyObject *key, PyObject *version) {
    PyObject *found = PyDict_GetItemWithError(reader->seen, key);
    ReadTensor *known = (ReadTensor *)found;
    if (found == NULL || Py_TYPE(found) != read_tensor_type || PyWeakref_GetObject(known->tensor) != x) {
        return NULL;
    }
    return PyObject_RichCompareBool(known->version, version, Py_EQ) == 1 ? known : NULL;
}

static int remember(Reader *reader, PyObject *x, PyObject *key, PyObject *version, int64_t row, int64_t layout) {
    if (PyDict_Size(reader->seen) >= MOST_READ) {
        PyDict_Clear(reader->seen);
    }
    PyObject *entry = new_read_tensor(x, version, row, layout);
    int done = entry == NULL ? -1 : PyDict_SetItem(reader->seen, key, entry);
    Py_XDECREF(entry);
    return done;
}

/* Under the lock: writes the row. `version` is NULL for a tensor that is not looked for under other names. */
static int write_row(Reader *reader, PyObject *x, const Elements *elements, const Slot *slot, int64_t offset, PyObject *version, int wanted) {
    Cells cells;
    int64_t row = slot->row + offset, layout;
    PyObject *key = version == NULL ? NULL : PyLong_FromVoidPtr(x);
    int done = NOT_DONE;
    if (copy_native(reader->table, &cells, sizeof cells) && (version == NULL || key != NULL)) {
        ReadTensor *known = version == NULL ? NULL : read_before(reader, x, key, version);
        double bound = elements->format == FLOAT64 ? reader->wide : reader->narrow;
        if (known != NULL) {
            if (known->row != row) { /* else the row holds it already, and may have aliases */
                note(&cells, row, known->layout, known->row);
            }
            done = DONE;
        } else if (!PyErr_Occurred() && (layout = layout_index(reader, x, elements)) >= 0 &&
                   kernel->reduce(elements->data, elements->count, elements->format, bound, wanted, slot->numbers + offset * kernel->columns)) {
            note(&cells, row, layout, -1);
            done = version == NULL || remember(reader, x, key, version, row, layout) == 0 ? DONE : FAILED;
        }
    }
    Py_XDECREF(key);
    return PyErr_Occurred() ? FAILED : done;
}

/* Records an ordinary tensor. NOT_DONE: it is not ordinary, and nothing was written. */
static int record_one(Reader *reader, PyObject *watched, PyObject *x, int64_t micro_step, int aliases) {
    Elements elements;
    Slot slot;
    if (!reader->ready || !look(x, &elements) || !find_slot(reader, watched, micro_step, &slot)) {
        return NOT_DONE;
    }
    PyObject *version = aliases ? PyObject_GetAttr(x, s__version) : NULL;
    if (aliases && version == NULL) { /* a tensor of inference mode has no version */
        PyErr_Clear();
        return NOT_DONE;
    }
    int wanted = reader->wanted | (is_true(watched, s_checked) ? CHECK_SUMS : 0), done = FAILED;
    PyObject *locked = PyObject_CallNoArgs(reader->acquire);
    if (locked != NULL) {
        done = write_row(reader, x, &elements, &slot, micro_step, version, wanted);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Py_XDECREF(PyObject_CallNoArgs(reader->release));
        PyErr_Restore(type, value, trace);
        Py_DECREF(locked);
    }
    Py_XDECREF(version);
    return done;
}

static PyObject *none_unless(int failed) {
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Records a tensor, ordinary or not. -1, with an exception set, if it could not be read. */
static int record_any(Reader *reader, PyObject *watched, PyObject *x, int64_t micro_step, PyObject *aliases) {
    int done = record_one(reader, watched, x, micro_step, aliases == Py_True);
    if (done == NOT_DONE) {
        PyObject *place = PyLong_FromLongLong(micro_step);
        PyObject *called =
            place == NULL ? NULL : PyObject_CallMethodObjArgs((PyObject *)reader, s_record_in_python, watched, x, place, aliases, NULL);
        done = called == NULL ? FAILED : DONE;
        Py_XDECREF(called);
        Py_XDECREF(place);
    }
    return done == FAILED ? -1 : 0;
}

/* record(watched, x, micro_step=0, *, aliases=True) */
static PyObject *reader_record(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *aliases = Py_True, *place = NULL;
    Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords), given = count;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(keywords, i);
        if (PyUnicode_CompareWithASCIIString(name, "aliases") == 0) {
            aliases = args[count + i];
        } else if (PyUnicode_CompareWithASCIIString(name, "micro_step") == 0 && count == 2) {
            place = args[count + i];
            given++;
        } else {
            return PyErr_Format(PyExc_TypeError, "record has no argument %R here", name);
        }
    }
    if (given < 2 || count > 3) {
        return PyErr_Format(PyExc_TypeError, "record takes 2 or 3 arguments, not %zd", count);
    }
    place = count == 3 ? args[2] : place;
    int64_t micro_step = place == NULL ? 0 : PyLong_AsLongLong(place);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return none_unless(record_any((Reader *)self, args[0], args[1], micro_step, aliases) < 0);
}

static int hand_over(PyObject *self, PyObject *rest, PyObject *failed) {
    PyObject *called = PyObject_CallMethodObjArgs(self, s_record_all_in_python, rest, failed, NULL);
    Py_XDECREF(called);
    return called == NULL ? -1 : PyList_SetSlice(rest, 0, PyList_Size(rest), NULL);
}

/* Every item in its order: those that are not ordinary are handed over together, before the next one that is. */
static PyObject *reader_record_all(PyObject *self, PyObject *args) {
    PyObject *given, *failed;
    if (!PyArg_ParseTuple(args, "OO", &given, &failed)) {
        return NULL;
    }
    PyObject *items = PySequence_List(given), *rest = items == NULL ? NULL : PyList_New(0);
    int error = rest == NULL;
    for (Py_ssize_t i = 0; !error && i < PyList_Size(items); i++) {
        PyObject *item = PyList_GetItem(items, i), *watched, *x;
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OO", &watched, &x)) {
            error = 1;
            break;
        }
        Elements elements;
        if (PyList_Size(rest) && look(x, &elements) && hand_over(self, rest, failed) < 0) {
            error = 1;
            break;
        }
        int done = record_one((Reader *)self, watched, x, 0, 0);
        if (done == FAILED) {
            PyErr_Clear(); /* Python repeats and reports it */
        }
        error = done != DONE && PyList_Append(rest, item) < 0;
    }
    if (!error && PyList_Size(rest)) {
        error = hand_over(self, rest, failed) < 0;
    }
    Py_XDECREF(items);
    Py_XDECREF(rest);
    return none_unless(error);
}

static PyObject *reader_share(PyObject *self, PyObject *args) {
    Reader *reader = (Reader *)self;
    PyObject *table, *layouts, *seen, *device, *lock;
    if (!PyArg_ParseTuple(args, "OO!O!OO", &table, &PyDict_Type, &layouts, &PyDict_Type, &seen, &device, &lock)) {
        return NULL;
    }
    reader->acquire = PyObject_GetAttrString(lock, "acquire");
    reader->release = PyObject_GetAttrString(lock, "release");
    reader->table = Py_NewRef(table);
    reader->layouts = Py_NewRef(layouts);
    reader->seen = Py_NewRef(seen);
    reader->device = Py_NewRef(device);
    reader->known = PyDict_New();
    return none_unless(reader->acquire == NULL || reader->release == NULL || reader->known == NULL);
}

static PyObject *reader_measure(PyObject *self, PyObject *args) {
    Reader *reader = (Reader *)self;
    int higher, check_sums;
    if (!PyArg_ParseTuple(args, "ddppp", &reader->narrow, &reader->wide, &higher, &check_sums, &reader->ready)) {
        return NULL;
    }
    reader->wanted = (higher ? HIGHER : 0) | (check_sums ? CHECK_SUMS : 0);
    reader->ready = reader->ready && exchange != NULL && reader->table != NULL;
    Py_RETURN_NONE;
}

static void reader_dealloc(PyObject *self) {
    Reader *reader = (Reader *)self;
    Py_XDECREF(reader->table);
    Py_XDECREF(reader->layouts);
    Py_XDECREF(reader->seen);
    Py_XDECREF(reader->device);
    Py_XDECREF(reader->known);
    Py_XDECREF(reader->acquire);
    Py_XDECREF(reader->release);
    free_object(self);
}

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
            PyErr_Clear();
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

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *reader, *watched, *gate;
    long long step, micro_step;
    Py_ssize_t k = ON_TENSOR;
    (void)type;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOLL|n", &reader, &watched, &gate, &step, &micro_step, &k)) {
        return NULL;
    }
    return new_writer(reader, watched, gate, step, micro_step, k);
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
    PyErr_Clear();
    return open;
}

static PyObject *writer_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    Writer *writer = (Writer *)self;
    PyObject *gradient = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    (void)kwargs;
    if (gradient != NULL && writer->k >= 0) { /* a function may return no gradient for an input */
        gradient = PyTuple_Check(gradient) ? PyTuple_GetItem(gradient, writer->k) : NULL;
    }
    PyErr_Clear();
    if (gradient == NULL || gradient == Py_None || !is_true(writer->gate, s_attached)) {
        Py_RETURN_NONE;
    }
    if (is_open(writer) && record_one((Reader *)writer->reader, writer->watched, gradient, writer->micro_step, 1) == DONE) {
        Py_RETURN_NONE;
    }
    PyErr_Clear(); /* `take` repeats and reports what failed; it raises only an error of training itself */
    return PyObject_CallMethod(writer->gate, "take", "OOLL", writer->watched, gradient, (long long)writer->step, (long long)writer->micro_step);
}

static PyType_Slot WRITER_SLOTS[] = {{Py_tp_new, writer_new}, {Py_tp_dealloc, writer_dealloc}, {Py_tp_call, writer_call}, {0, NULL}};
static PyType_Spec WRITER = {"monitor.pytorch._fast_path.GradientWriter", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT, WRITER_SLOTS};

/* --- The graph of a call. */

/* The targets of the gradients of inputs, each with the series: {(node, number of its output): series}. NULL, perhaps without an
 * exception, if they are not ordinary: two arguments with one gradient have a joint name. */
static PyObject *find_targets(const Leaves *inputs) {
    PyObject *targets = PyDict_New();
    for (int i = 0; targets != NULL && i < inputs->count; i++) {
        const Leaf *leaf = &inputs->leaves[i];
        if (leaf->node == NULL) {
            continue;
        }
        PyObject *output_nr = PyObject_GetAttr(leaf->x, s_output_nr);
        PyObject *target = output_nr == NULL ? NULL : PyTuple_Pack(2, leaf->node, output_nr);
        if (target == NULL || PyDict_Contains(targets, target) != 0 || PyDict_SetItem(targets, target, leaf->gradient) < 0) {
            Py_CLEAR(targets);
        }
        Py_XDECREF(target);
        Py_XDECREF(output_nr);
    }
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
            PyErr_Clear();
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
    PyObject *target, *name;
    Py_ssize_t place = 0;
    while (PyDict_Next(targets, &place, &target, &name)) {
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
        if (watched == NULL || watched == Py_None || count == 0) {
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

static int follow_inputs(const Leaves *results, PyObject *targets, const Watching *of, PyObject *several) {
    Walk walk = {PyDict_New(), PySet_New(NULL), PyList_New(0), ((Reader *)of->reader)->known, of->start, 0};
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
        if (answer == NULL) { /* the targets are not ordinary: Python finds them */
            PyErr_Clear();
            answer = Py_NewRef(Py_False);
        }
    }
    free_leaves(&inputs);
    return answer;
}

/* Nodes that are known keep their graph alive. */
static PyObject *reader_forget_graph(PyObject *self, PyObject *unused) {
    (void)unused;
    if (((Reader *)self)->known != NULL) {
        PyDict_Clear(((Reader *)self)->known);
    }
    Py_RETURN_NONE;
}

enum { NOT_WATCHED = 1, NOT_FOLLOWED = 2 };

static PyObject *reader_end_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 10) {
        return PyErr_Format(PyExc_TypeError, "end_call takes 10 arguments, not %zd", count);
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
            followed = known ? follow_inputs(&results, targets, &of, args[9]) : NOT_DONE;
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
    {"record_all", reader_record_all, METH_VARARGS, "See TensorReader."},
    {"begin_call", (PyCFunction)(void (*)(void))reader_begin_call, METH_FASTCALL,
     "begin_call(plan, values, micro_step, forward, graph)"},
    {"end_call", (PyCFunction)(void (*)(void))reader_end_call, METH_FASTCALL,
     "end_call(plan, result, forward, graph, targets, start, gate, step, micro_step, several)"},
    {"forget_graph", reader_forget_graph, METH_NOARGS, "Forget the nodes that were visited."},
    {"_share", reader_share, METH_VARARGS, "_share(table, layouts, seen, device, lock): the state of the reader in Python"},
    {"_measure", reader_measure, METH_VARARGS, "_measure(narrow, wide, higher, check_sums, ready)"},
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
            args, "OOOOOOOO", &capsule, &tensor_type, &parameter_type, &accumulation, &forwarding, &is_lazy_copy, &current_sequence_nr,
            &new_hooks)) {
        return NULL;
    }
    const DLPackExchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    kernel = found == NULL ? NULL : PyCapsule_Import(KERNEL_CAPSULE, 0);
    if (kernel == NULL) {
        return NULL;
    }
    PyObject *kept[] = {capsule, tensor_type, parameter_type, accumulation, forwarding, is_lazy_copy, current_sequence_nr, new_hooks};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        Py_INCREF(kept[i]); /* for as long as the process lives */
    }
    exchange = found->major == DL_MAJOR && found->dltensor_from_py_object_no_sync != NULL ? found : NULL;
    return PyBool_FromLong(exchange != NULL);
}

static PyMethodDef METHODS[] = {
    {"set_up", set_up, METH_VARARGS,
     "set_up(exchange, Tensor, Parameter, AccumulateGrad, forwarding, is_lazy_copy, sequence_nr, new_hooks) -> whether it can be used"},
    {NULL, NULL, 0, NULL},
};

#define INTERN(name) && (s_##name = PyUnicode_InternFromString(#name)) != NULL

static int prepare(PyObject *module) {
    if (!(1 NAMES(INTERN))) {
        return -1;
    }
    PyObject *reader = PyType_FromSpec(&READER);
    read_tensor_type = (PyTypeObject *)PyType_FromSpec(&READ_TENSOR);
    writer_type = (PyTypeObject *)PyType_FromSpec(&WRITER);
    int failed = reader == NULL || read_tensor_type == NULL || writer_type == NULL ||
                 PyModule_AddType(module, (PyTypeObject *)reader) < 0 || PyModule_AddType(module, read_tensor_type) < 0 ||
                 PyModule_AddType(module, writer_type) < 0;
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
