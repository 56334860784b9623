/* Reads lists of tensors on a device. Part of fast_path.c. */

#ifndef MONITOR_FAST_LISTS_H
#define MONITOR_FAST_LISTS_H

#include "fast_rows.h"

/* --- One launch for each kind of tensor. Its table needs the address, the size and the address of the row of each tensor. */

typedef struct {
    int64_t row, layout;
} Listed;

/* The tensor that an item holds: itself, or the local part of a DTensor, which is kept in `parts` until it is read. Borrowed. */
static PyObject *local_of(PyObject *x, PyObject *parts) {
    PyObject *part = is_plain(x) ? NULL : PyObject_GetAttr(x, s__local_tensor);
    int kept = part != NULL && PyList_Append(parts, part) == 0;
    Py_XDECREF(part);
    forget_failure();
    return kept ? part : x;
}

/* The lists of a kind, (first, addresses, sizes, rows), in `groups`; borrowed. NULL with an exception set. */
static PyObject *group_of(Reader *reader, PyObject *groups, PyObject *x, const Elements *elements, int checked) {
    PyObject *dtype = PyObject_GetAttr(x, s_dtype), *found = NULL;
    int aligned = (uintptr_t)elements->data % (uintptr_t)reader->read == 0, even = elements->count % (size_t)reader->even == 0;
    PyObject *key = dtype == NULL ? NULL : Py_BuildValue("(iOOO)O", elements->device, dtype, aligned ? Py_True : Py_False,
                                                         even ? Py_True : Py_False, checked ? Py_True : Py_False);
    found = key == NULL ? NULL : PyDict_GetItemWithError(groups, key);
    if (key != NULL && found == NULL && !PyErr_Occurred()) {
        PyObject *made = Py_BuildValue("O[][][]", x);
        found = made != NULL && PyDict_SetItem(groups, key, made) == 0 ? made : NULL; /* the dictionary holds it */
        Py_XDECREF(made);
    }
    Py_XDECREF(key);
    Py_XDECREF(dtype);
    return found;
}

static int append(PyObject *group, int place, int64_t value) {
    PyObject *number_of = PyLong_FromLongLong(value);
    int failed = number_of == NULL || PyList_Append(PyTuple_GetItem(group, place), number_of) < 0;
    Py_XDECREF(number_of);
    return !failed;
}

/* Adds a page if it is another one than that of the item before. 0: a graph is captured there. */
static int add_page(Reader *reader, PyObject *pages, PyObject *page, PyObject *x) {
    Py_ssize_t known = PyList_Size(pages);
    return (known && PyList_GetItem(pages, known - 1) == page) || (!is_captured(reader, x) && PyList_Append(pages, page) == 0);
}

/* Adds an item to the list of its kind, and its page to `pages`. */
static int list_item(Reader *reader, PyObject *item, PyObject *groups, PyObject *pages, PyObject *parts, Listed *listed) {
    PyObject *watched = PyTuple_GetItem(item, 0), *given = PyTuple_GetItem(item, 1);
    if (watched == NULL || given == NULL) {
        return 0;
    }
    PyObject *x = local_of(given, parts);
    Elements elements;
    Slot slot;
    int done = look(x, &elements) && find_slot(reader, watched, x, &elements, 0, &slot);
    if (done) {
        int checked = (reader->wanted & CHECK_SUMS) || is_true(watched, s_checked);
        PyObject *group = slot.object == NULL ? NULL : group_of(reader, groups, x, &elements, checked);
        PyObject *page = group == NULL ? NULL : PyObject_GetAttr(slot.object, s_page);
        listed->row = slot.place.row;
        listed->layout = page == NULL ? -1 : layout_index(reader, x, &elements);
        done = listed->layout >= 0 && add_page(reader, pages, page, x) && append(group, 1, (int64_t)(uintptr_t)elements.data) &&
               append(group, 2, (int64_t)elements.count) && append(group, 3, (int64_t)(uintptr_t)slot.place.numbers);
        Py_XDECREF(page);
        Py_XDECREF(slot.object);
    }
    return done;
}

/* Under the lock: lists all items and launches. */
static int launch_listed(Reader *reader, PyObject *items, Listed *listed) {
    PyObject *groups = PyDict_New(), *pages = PyList_New(0), *parts = PyList_New(0);
    Py_ssize_t count = PyList_Size(items);
    Cells cells;
    int fits = groups != NULL && pages != NULL && parts != NULL;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        fits = list_item(reader, PyList_GetItem(items, i), groups, pages, parts, &listed[i]);
    }
    PyObject *launched = fits ? PyObject_CallMethodObjArgs((PyObject *)reader, s_launch_all, pages, groups, NULL) : NULL;
    int done = launched == Py_True && copy_native(reader->table, &cells, sizeof cells);
    for (Py_ssize_t i = 0; done && i < count; i++) {
        note(&cells, listed[i].row, listed[i].layout, -1);
    }
    Py_XDECREF(launched);
    Py_XDECREF(groups);
    Py_XDECREF(pages);
    Py_XDECREF(parts);
    forget_failure();
    return PyErr_Occurred() ? FAILED : done ? DONE : NOT_DONE;
}

/* Records items that are all dense tensors of a device. NOT_DONE: one is not. Whatever was launched is then launched again. */
static int record_listed(Reader *reader, PyObject *items) {
    Listed *listed = reader->ready && !reader->counting ? PyMem_Malloc((size_t)PyList_Size(items) * sizeof *listed) : NULL;
    PyObject *locked = listed == NULL ? NULL : PyObject_CallNoArgs(reader->acquire);
    int done = NOT_DONE;
    if (locked != NULL) {
        done = launch_listed(reader, items, listed);
        unlock(reader);
    }
    Py_XDECREF(locked);
    PyMem_Free(listed);
    forget_failure();
    return PyErr_Occurred() ? FAILED : done;
}

static int hand_over(PyObject *self, PyObject *rest, PyObject *failed) {
    int done = record_listed((Reader *)self, rest);
    if (done == NOT_DONE) {
        PyObject *called = PyObject_CallMethodObjArgs(self, s_record_all_in_python, rest, failed, NULL);
        done = called == NULL ? FAILED : DONE;
        Py_XDECREF(called);
    }
    return done == FAILED ? -1 : PyList_SetSlice(rest, 0, PyList_Size(rest), NULL);
}

/* Every item in its order: those that are not ordinary, or not in host memory, are handed over together, before the next one that is. */
static PyObject *reader_record_all(PyObject *self, PyObject *args) {
    PyObject *given, *failed;
    if (!PyArg_ParseTuple(args, "OO", &given, &failed)) {
        return NULL;
    }
    PyObject *items = PySequence_List(given), *rest = items == NULL ? NULL : PyList_New(0);
    int error = rest == NULL;
    for (Py_ssize_t i = 0; !error && i < PyList_Size(items); i++) {
        PyObject *item = PyList_GetItem(items, i), *watched = PyTuple_GetItem(item, 0), *x = PyTuple_GetItem(item, 1);
        if (watched == NULL || x == NULL) {
            error = 1;
            break;
        }
        Elements elements;
        int here = is_true(x, s_is_cpu);
        if (here && PyList_Size(rest) && look(x, &elements) && hand_over(self, rest, failed) < 0) {
            error = 1;
            break;
        }
        int done = here ? record_one((Reader *)self, watched, x, 0, 0, NULL) : NOT_DONE;
        forget_failure();
        error = PyErr_Occurred() || (done != DONE && PyList_Append(rest, item) < 0);
    }
    if (!error && PyList_Size(rest)) {
        error = hand_over(self, rest, failed) < 0;
    }
    Py_XDECREF(items);
    Py_XDECREF(rest);
    return none_unless(error);
}

#endif
