/* Records tensors into the rows of the table. Part of fast_path.c. */

#ifndef MONITOR_FAST_ROWS_H
#define MONITOR_FAST_ROWS_H

#include "fast_tensors.h"

/* --- A tensor that was read: what `TorchTensorReader` remembers to recognise it under another name.
 *
 * Python's garbage collector does not know objects of this module: thousands of them live until the end of a step and would start it.
 * They refer neither to modules nor to the graph, so no cycle contains them. */

typedef struct {
    PyObject_HEAD
    PyObject *tensor, *version; /* a weak reference; an int, or a tuple of compiled code */
    int64_t row, layout, address; /* `address`: of its first element. `x.data = ...` changes it, and no version */
} ReadTensor;

static PyTypeObject *read_tensor_type, *writer_type;

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *new_read_tensor(PyObject *x, PyObject *version, int64_t row, int64_t layout, int64_t address) {
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
    made->address = address;
    return (PyObject *)made;
}

static PyObject *read_tensor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *x, *version;
    long long row, layout, address;
    (void)type;
    (void)kwargs;
    return PyArg_ParseTuple(args, "OOLLL", &x, &version, &row, &layout, &address)
               ? new_read_tensor(x, version, row, layout, address)
               : NULL;
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
    {"address", T_LONGLONG, offsetof(ReadTensor, address), READONLY, "The address of its first element."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot READ_TENSOR_SLOTS[] = {
    {Py_tp_new, read_tensor_new}, {Py_tp_dealloc, read_tensor_dealloc}, {Py_tp_members, READ_TENSOR_MEMBERS}, {0, NULL}};
static PyType_Spec READ_TENSOR = {"monitor.pytorch._fast_path.ReadTensor", sizeof(ReadTensor), 0, Py_TPFLAGS_DEFAULT, READ_TENSOR_SLOTS};

/* --- The reader: the base class of `TorchTensorReader`. */

typedef struct {
    PyObject_HEAD
    PyObject *table, *layouts, *seen, *device, *acquire, *release; /* `layouts`: index of each layout, by its key */
    double narrow, wide;                                             /* bounds below which elements count as zeros */
    Py_ssize_t most_seen;
    int read, even; /* tensors whose address, and whose size, is a multiple of these have a kernel of their own on a device */
    int wanted, counting, ready; /* `counting`: histograms */
} Reader;

typedef struct {
    double *numbers;
    int64_t row, rows, on_device;
    double **histograms; /* of the page; they may be NULL */
    int64_t local_row;
} Place; /* RowSlot.native */

typedef struct {
    Place place;
    PyObject *object; /* the RowSlot; NULL where numbers are in host memory */
} Slot;

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
    forget_failure();
    return fits;
}

/* Whether the histogram of a tensor can be counted here: of elements in host memory that are not wide, where Python has made room. */
static int can_count(const Elements *elements, const Slot *slot) {
    return slot->object == NULL && !is_wide(elements->format) && *slot->place.histograms != NULL;
}

/* Finds the rows of a series for tensors of the device of `x`. */
static int find_slot(Reader *reader, PyObject *watched, PyObject *x, const Elements *elements, int64_t micro_step, Slot *slot) {
    PyObject *slots = PyObject_GetAttr(watched, s_slots);
    PyObject *device = elements->device < 0 ? Py_NewRef(reader->device) : PyObject_GetAttr(x, s_device);
    PyObject *found = slots == NULL || device == NULL ? NULL : PyDict_GetItemWithError(slots, device);
    int there = copy_native(found, &slot->place, sizeof slot->place) && micro_step >= 0 && micro_step < slot->place.rows;
    slot->object = there && slot->place.on_device ? Py_NewRef(found) : NULL;
    Py_XDECREF(device);
    Py_XDECREF(slots);
    forget_failure();
    return there;
}

/* Whether work on the device of `x` is captured now: its rows need more than a launch. An error counts as yes. */
static int is_captured(Reader *reader, PyObject *x) {
    PyObject *device = PyObject_GetAttr(x, s_device);
    int no = device != NULL && answers_no(PyObject_CallMethodObjArgs((PyObject *)reader, s_captures, device, NULL));
    Py_XDECREF(device);
    forget_failure();
    return !no;
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
static ReadTensor *read_before(Reader *reader, PyObject *x, PyObject *key, PyObject *version, const Elements *elements) {
    PyObject *found = PyDict_GetItemWithError(reader->seen, key);
    ReadTensor *known = (ReadTensor *)found;
    if (found == NULL || Py_TYPE(found) != read_tensor_type || PyWeakref_GetObject(known->tensor) != x) {
        return NULL;
    }
    if (known->address != (int64_t)(intptr_t)elements->data) {
        return NULL;
    }
    return PyObject_RichCompareBool(known->version, version, Py_EQ) == 1 ? known : NULL;
}

static int remember(Reader *reader, PyObject *x, PyObject *key, PyObject *version, int64_t row, int64_t layout, const Elements *elements) {
    if (PyDict_Size(reader->seen) >= reader->most_seen) {
        PyDict_Clear(reader->seen);
    }
    PyObject *entry = new_read_tensor(x, version, row, layout, (int64_t)(intptr_t)elements->data);
    int done = entry == NULL ? -1 : PyDict_SetItem(reader->seen, key, entry);
    Py_XDECREF(entry);
    return done;
}

/* Reduces the elements: here, or by a launch on their device. 0, perhaps with an exception set: nothing was written. */
static int reduce(Reader *reader, PyObject *x, const Elements *elements, const Slot *slot, int64_t offset, int wanted) {
    double *numbers = slot->place.numbers + offset * kernel->columns;
    if (slot->object == NULL) {
        double bound = is_wide(elements->format) ? reader->wide : reader->narrow;
        double *bins = reader->counting ? *slot->place.histograms + (slot->place.local_row + offset) * kernel->bins : NULL;
        return kernel->reduce(elements->data, elements->count, elements->format, bound, wanted, numbers, bins);
    }
    PyObject *done = PyObject_CallMethod(
        (PyObject *)reader, "launch", "OOiKnKi", slot->object, x, elements->device, (unsigned long long)(uintptr_t)elements->data,
        (Py_ssize_t)elements->count, (unsigned long long)(uintptr_t)numbers, wanted & CHECK_SUMS);
    int launched = done == Py_True;
    Py_XDECREF(done);
    return launched;
}

/* Under the lock: writes the row. `version` is NULL for a tensor that is not looked for under other names. */
static int write_row(Reader *reader, PyObject *x, const Elements *elements, const Slot *slot, int64_t offset, PyObject *version, int wanted) {
    Cells cells;
    int64_t row = slot->place.row + offset, layout;
    PyObject *key = version == NULL ? NULL : PyLong_FromVoidPtr(x);
    int done = NOT_DONE;
    if (copy_native(reader->table, &cells, sizeof cells) && (version == NULL || key != NULL)) {
        ReadTensor *known = version == NULL ? NULL : read_before(reader, x, key, version, elements);
        if (known != NULL) {
            if (known->row != row) { /* else the row holds it already, and may have aliases */
                note(&cells, row, known->layout, known->row);
            }
            done = DONE;
        } else if (!PyErr_Occurred() && (layout = layout_index(reader, x, elements)) >= 0 &&
                   reduce(reader, x, elements, slot, offset, wanted)) {
            note(&cells, row, layout, -1);
            done = version == NULL || remember(reader, x, key, version, row, layout, elements) == 0 ? DONE : FAILED;
        }
    }
    Py_XDECREF(key);
    return PyErr_Occurred() ? FAILED : done;
}

static void unlock(Reader *reader) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(reader->release));
    PyErr_Restore(type, value, trace);
}

/* What identifies the numbers of `x`: its version, in compiled code together with the number of its `value`; NULL, with an exception
 * set, in inference mode. */
static PyObject *version_of(PyObject *x, PyObject *value) {
    PyObject *version = PyObject_GetAttr(x, s__version);
    if (version == NULL || value == NULL) {
        return version;
    }
    PyObject *both = PyTuple_Pack(2, value, version);
    Py_DECREF(version);
    return both;
}

/* Records an ordinary tensor. NOT_DONE: it is not ordinary, and nothing was written. `value`: see `version_of`; NULL in eager code. */
static int record_one(Reader *reader, PyObject *watched, PyObject *x, int64_t micro_step, int aliases, PyObject *value) {
    Elements elements;
    Slot slot;
    if (!reader->ready || !look(x, &elements) || !find_slot(reader, watched, x, &elements, micro_step, &slot)) {
        return PyErr_Occurred() ? FAILED : NOT_DONE;
    }
    PyObject *version = aliases ? version_of(x, value) : NULL;
    int apart = (aliases && version == NULL) || (reader->counting && !can_count(&elements, &slot));
    if (apart || (slot.object != NULL && is_captured(reader, x))) {
        forget_failure();
        Py_XDECREF(version);
        Py_XDECREF(slot.object);
        return PyErr_Occurred() ? FAILED : NOT_DONE;
    }
    int wanted = reader->wanted | (is_true(watched, s_checked) ? CHECK_SUMS : 0), done = FAILED;
    PyObject *locked = PyObject_CallNoArgs(reader->acquire);
    if (locked != NULL) {
        done = write_row(reader, x, &elements, &slot, micro_step, version, wanted);
        unlock(reader);
        Py_DECREF(locked);
    }
    Py_XDECREF(version);
    Py_XDECREF(slot.object);
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
    int done = record_one(reader, watched, x, micro_step, aliases == Py_True, NULL);
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

/* record_ordinary(watched, x, micro_step, value) */
static PyObject *reader_record_ordinary(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        return PyErr_Format(PyExc_TypeError, "record_ordinary takes 4 arguments, not %zd", count);
    }
    int64_t micro_step = PyLong_AsLongLong(args[2]), value = PyLong_AsLongLong(args[3]);
    int done = PyErr_Occurred() ? FAILED : record_one((Reader *)self, args[0], args[1], micro_step, value >= 0, args[3]);
    return done == FAILED ? NULL : PyBool_FromLong(done == DONE);
}

static PyObject *reader_share(PyObject *self, PyObject *args) {
    Reader *reader = (Reader *)self;
    PyObject *table, *layouts, *seen, *device, *lock;
    if (!PyArg_ParseTuple(args, "OO!O!nOOii", &table, &PyDict_Type, &layouts, &PyDict_Type, &seen, &reader->most_seen, &device, &lock,
                          &reader->read, &reader->even)) {
        return NULL;
    }
    reader->acquire = PyObject_GetAttrString(lock, "acquire");
    reader->release = PyObject_GetAttrString(lock, "release");
    reader->table = Py_NewRef(table);
    reader->layouts = Py_NewRef(layouts);
    reader->seen = Py_NewRef(seen);
    reader->device = Py_NewRef(device);
    return none_unless(reader->acquire == NULL || reader->release == NULL);
}

static PyObject *reader_measure(PyObject *self, PyObject *args) {
    Reader *reader = (Reader *)self;
    int higher, check_sums;
    if (!PyArg_ParseTuple(args, "ddpppp", &reader->narrow, &reader->wide, &higher, &check_sums, &reader->counting, &reader->ready)) {
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
    Py_XDECREF(reader->acquire);
    Py_XDECREF(reader->release);
    free_object(self);
}

#endif
