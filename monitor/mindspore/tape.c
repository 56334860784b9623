/* The operators with which MindSpore's executor measures tensors, in its own order: see monitor/mindspore/tape.py.
 *
 * Each measurement is an entry of a *tape*, a buffer that grows and that Python drains. An entry holds all that Python needs: no
 * pointer leads from a compiled graph, which may outlive the monitor, to memory of Python. MindSpore raises an error in training if
 * an operator fails, so the operators never do: what they cannot measure has an entry without numbers. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../stats/host_kernel.h"

#define EXPORTED __attribute__((visibility("default")))

enum { SLOT = 3, MOST_TAPES = 256, MOST_DIMENSIONS = 32 /* as in numpy 1 */, ROW = 20 };
enum { GATED = 1, CHECKED = 2, MARK = 4, TURN = 8, FORWARD = 16, BACKWARD = 32 };

/* What an entry has: all numbers; only elements, a copy that Python has to reduce; or neither. */
enum { MEASURED, SET_ASIDE, UNREADABLE };

struct entry {
    int64_t id, flags, state, format, dimensions, shape[MOST_DIMENSIONS], number, call, site, more; /* `more`: whether it has an aside */
    double row[ROW];
};

/* More of an entry: a copy of its elements, or the histogram of a tensor that was measured. */
struct aside {
    size_t bytes;
    void *contents;
};

struct tape {
    int64_t number; /* its place in TAPES + a multiple of MOST_TAPES, never twice: compiled graphs may know closed tapes */
    int open, on, wanted, counting, turns, stopped; /* `counting`: histograms of magnitudes */
    int64_t resting;                 /* since when its owner does not use it; 0 while it does */
    int64_t most_forwards, forwards; /* forwards without a backward: the most, and how many are there */
    int64_t dropped;                 /* the number of the last entry that was dropped since there were too many */
    size_t kept;                     /* entries before this place belong to a backward, or to the end of a step */
    double bounds[FORMATS];
    struct entry *entries;
    size_t used, room;
    struct aside *asides;
    size_t asides_used, asides_room;
};

static const struct host_kernel *KERNEL = NULL;
static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t TURNED = PTHREAD_COND_INITIALIZER;
static struct tape TAPES[MOST_TAPES];

/* MindSpore's names of dtypes, with the format of the host kernel; -1 where Python reduces the elements. */
static const struct {
    const char *name;
    int format;
    size_t bytes;
} DTYPES[] = {
    {"float32", FLOAT32, 4}, {"bfloat16", BFLOAT16, 2}, {"float16", FLOAT16, 2}, {"float64", FLOAT64, 8}, {"int64", INT64, 8},
    {"int32", -1, 4}, {"bool", -1, 1}, {"uint8", -1, 1}, {"int8", -1, 1}, {"int16", -1, 2}, {"uint16", -1, 2},
    {"uint32", -1, 4}, {"uint64", -1, 8}, {"complex64", -1, 8}, {"complex128", -1, 16},
};
enum { DTYPE_COUNT = sizeof DTYPES / sizeof *DTYPES };

/* An array with room for one element more; NULL, with the array as it was, if there is no memory. */
static void *grown(void *array, size_t used, size_t *room, size_t bytes) {
    if (used < *room) {
        return array;
    }
    size_t wanted = *room ? 2 * *room : 64;
    void *larger = realloc(array, wanted * bytes);
    if (larger != NULL) {
        *room = wanted;
    }
    return larger;
}

static size_t count_of(const struct entry *entry) {
    size_t count = 1;
    for (int64_t i = 0; i < entry->dimensions; i++) {
        count *= (size_t)entry->shape[i];
    }
    return count;
}

/* Copies elements that Python has to reduce. Called without the lock. */
static struct aside copied(const void *x, size_t bytes) {
    struct aside aside = {bytes, malloc(bytes ? bytes : 1)};
    if (aside.contents != NULL) {
        memcpy(aside.contents, x, bytes);
    }
    return aside;
}

/* The open tape with a number; NULL if there is none. The caller holds the lock, or the GIL, under which tapes open and close. */
static struct tape *open_with(int64_t number) {
    struct tape *tape = number >= 0 ? &TAPES[number % MOST_TAPES] : NULL;
    return tape != NULL && tape->open && tape->number == number ? tape : NULL;
}

/* Drops the older half of the forwards that no backward has followed: of an evaluation that the compiler could not know as one.
 * The caller holds the lock. */
static void drop_oldest(struct tape *tape) {
    size_t end = tape->kept, asides = 0, kept_asides = 0;
    int64_t left = tape->most_forwards;
    for (size_t i = 0; i < tape->kept; i++) {
        kept_asides += tape->entries[i].more != 0;
    }
    for (int64_t begun = 0; end < tape->used; end++) {
        begun += (tape->entries[end].flags & FORWARD) != 0;
        if (begun > tape->forwards - left) {
            break;
        }
        asides += tape->entries[end].more != 0;
        tape->dropped = tape->entries[end].number > tape->dropped ? tape->entries[end].number : tape->dropped;
    }
    for (size_t i = kept_asides; i < kept_asides + asides; i++) {
        free(tape->asides[i].contents);
    }
    size_t more = tape->asides_used - kept_asides - asides;
    if (asides) {
        memmove(tape->asides + kept_asides, tape->asides + kept_asides + asides, more * sizeof *tape->asides);
    }
    memmove(tape->entries + tape->kept, tape->entries + end, (tape->used - end) * sizeof *tape->entries);
    tape->asides_used -= asides;
    tape->used -= end - tape->kept;
    tape->forwards = left;
}

/* Counts the forwards that no backward has followed, after an entry was appended. The caller holds the lock. */
static void count_forwards(struct tape *tape, int64_t flags) {
    if (flags & (BACKWARD | TURN)) {
        tape->kept = tape->used;
        tape->forwards = 0;
    } else if (flags & FORWARD && tape->most_forwards && ++tape->forwards >= 2 * tape->most_forwards) {
        drop_oldest(tape);
    }
}

/* Appends an entry; drops it, and its aside, if the tape was closed or there is no memory. */
static void append(int64_t number, const struct entry *entry, struct aside aside) {
    pthread_mutex_lock(&LOCK);
    struct tape *tape = open_with(number);
    struct entry *entries = tape != NULL ? grown(tape->entries, tape->used, &tape->room, sizeof *entries) : NULL;
    if (entries != NULL) {
        tape->entries = entries;
        struct aside *asides = tape->asides;
        if (entry->more) {
            asides = grown(tape->asides, tape->asides_used, &tape->asides_room, sizeof *asides);
        }
        if (!entry->more || asides != NULL) {
            tape->asides = asides;
            tape->entries[tape->used++] = *entry;
            if (entry->more) {
                tape->asides[tape->asides_used++] = aside;
                aside.contents = NULL;
            }
            count_forwards(tape, entry->flags);
        }
    }
    pthread_mutex_unlock(&LOCK);
    free(aside.contents);
}

/* The tape of a slot if it takes entries now, with its settings in `now`; else NULL. */
static struct tape *taking(const int64_t *slot, struct tape *now) {
    pthread_mutex_lock(&LOCK);
    struct tape *tape = open_with(slot[0]);
    if (tape != NULL) {
        *now = *tape;
    }
    pthread_mutex_unlock(&LOCK);
    return tape != NULL && (now->on || !(slot[2] & GATED)) ? tape : NULL;
}

static void measure(const void *x, const char *dtype, struct entry *entry, const struct tape *now, struct aside *aside) {
    int known = 0;
    while (known < DTYPE_COUNT && strcmp(DTYPES[known].name, dtype) != 0) {
        known++;
    }
    entry->state = UNREADABLE;
    if (known == DTYPE_COUNT) {
        return;
    }
    size_t count = count_of(entry);
    entry->format = known;
    int format = DTYPES[known].format, wanted = now->wanted | (entry->flags & CHECKED ? CHECK_SUMS : 0);
    struct aside bins = {now->counting ? sizeof(double) * (size_t)KERNEL->bins : 0, NULL};
    int here = format >= 0 && count && !(now->counting && is_wide((enum format)format)); /* else Python counts magnitudes, too */
    if (here && now->counting) {
        bins.contents = malloc(bins.bytes);
        here = bins.contents != NULL;
    }
    if (here && KERNEL->reduce_unlocked(
                    x, count, (enum format)format, now->bounds[format], wanted, entry->row, (double *)bins.contents)) {
        entry->state = MEASURED;
        entry->more = now->counting;
        *aside = bins;
        return;
    }
    free(bins.contents);
    *aside = copied(x, count * DTYPES[known].bytes);
    entry->more = aside->contents != NULL;
    entry->state = entry->more ? SET_ASIDE : UNREADABLE;
}

/* Appends an entry to the tape of a slot, if it takes entries. */
static void enter(struct entry entry, const int64_t *slot, const void *x, const int64_t *shape, const char *dtype) {
    struct tape now;
    if (taking(slot, &now) == NULL || KERNEL == NULL || entry.dimensions > MOST_DIMENSIONS) {
        return;
    }
    struct aside aside = {0, NULL};
    memcpy(entry.shape, shape, (size_t)entry.dimensions * sizeof *entry.shape);
    if (!(entry.flags & MARK)) {
        measure(x, dtype, &entry, &now, &aside);
    }
    append(slot[0], &entry, aside);
}

/* The operator `read(x, slot)`: appends the measurements of `x` to a tape. A slot is int64: the number of the tape, an id, and
 * flags. */
EXPORTED int read_tensor(int count, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra) {
    (void)stream;
    (void)extra;
    if (count != 3) {
        return 0;
    }
    const int64_t *slot = params[1];
    *(int32_t *)params[2] = 0;
    struct entry entry = {.id = slot[1], .flags = slot[2], .format = -1, .dimensions = ndims[0]};
    enter(entry, slot, params[0], shapes[0], dtypes[0]);
    return 0;
}

static int64_t next_number(void) {
    static int64_t last = 0;
    pthread_mutex_lock(&LOCK);
    int64_t number = ++last;
    pthread_mutex_unlock(&LOCK);
    return number;
}

/* The place of each operator `follow` in compiled code: MindSpore prepares those of a graph one after the other, each before the
 * operators that depend on it, and always in the same order. `extra` is the same pointer when an operator is prepared and when it
 * runs. Ordered by pointer; they may be used again, for operators of other graphs. */
static struct site {
    void *extra;
    int64_t number;
} *SITES = NULL;
static size_t sites_used = 0, sites_room = 0;

/* The index of an operator in SITES, or that at which it belongs there. The caller holds the lock. */
static size_t site_index(const void *extra) {
    size_t low = 0, high = sites_used;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((uintptr_t)SITES[middle].extra < (uintptr_t)extra) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int64_t site_of(const void *extra) {
    pthread_mutex_lock(&LOCK);
    size_t i = site_index(extra);
    int64_t number = i < sites_used && SITES[i].extra == extra ? SITES[i].number : 0;
    pthread_mutex_unlock(&LOCK);
    return number;
}

/* MindSpore calls it by its name when it prepares an operator `follow`. */
EXPORTED int follow_tensorInit(int *ndims, int64_t **shapes, const char **dtypes, void *extra) {
    (void)ndims;
    (void)shapes;
    (void)dtypes;
    static int64_t last = 0;
    pthread_mutex_lock(&LOCK);
    size_t i = site_index(extra);
    if (i == sites_used || SITES[i].extra != extra) {
        struct site *sites = grown(SITES, sites_used, &sites_room, sizeof *sites);
        if (sites == NULL) {
            pthread_mutex_unlock(&LOCK);
            return 0;
        }
        SITES = sites;
        memmove(SITES + i + 1, SITES + i, (sites_used - i) * sizeof *SITES);
        sites_used++;
    }
    SITES[i] = (struct site){extra, ++last};
    pthread_mutex_unlock(&LOCK);
    return 0;
}

/* Wakes the threads in `wait_for_turn`. It takes no GIL: a thread of Python may hold the GIL and wait for this operator. */
static void end_turn(const int64_t *slot) {
    pthread_mutex_lock(&LOCK);
    struct tape *tape = open_with(slot[0]);
    if (tape != NULL) {
        tape->turns = 1;
        pthread_cond_broadcast(&TURNED);
    }
    pthread_mutex_unlock(&LOCK);
}

/* The operator `follow(x, slot, call)`: as `read`. Its entry holds `call` and a number, which the operator returns: the `call` of
 * all that belongs to what this entry begins. A slot may have the flag MARK, for an entry without measurements, and the flag TURN,
 * which ends `wait_for_turn`. FORWARD is of slots whose entries begin a forward of the model, BACKWARD of those whose entries show
 * that one has a backward. */
EXPORTED int follow_tensor(int count, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra) {
    (void)stream;
    if (count != 4) {
        return 0;
    }
    const int64_t *slot = params[1], *call = params[2];
    int64_t number = next_number();
    *(int64_t *)params[3] = number;
    struct entry entry = {.id = slot[1], .flags = slot[2], .format = -1, .dimensions = ndims[0], .number = number, .call = *call,
                          .site = site_of(extra)};
    enter(entry, slot, params[0], shapes[0], dtypes[0]);
    if (slot[2] & TURN) {
        end_turn(slot);
    }
    return 0;
}

/* The operator `follow_all(x, ..., slots, call)`: an entry for each x. `slots` has their slots one after the other. */
EXPORTED int follow_tensors(int count, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra) {
    (void)stream;
    (void)extra;
    int tensors = count - 3;
    if (tensors < 0) {
        return 0;
    }
    const int64_t *slot = params[tensors], *call = params[tensors + 1];
    *(int64_t *)params[tensors + 2] = *call;
    for (int i = 0; i < tensors; i++, slot += SLOT) {
        struct entry entry = {.id = slot[1], .flags = slot[2], .format = -1, .dimensions = ndims[i], .number = next_number(), .call = *call};
        enter(entry, slot, params[i], shapes[i], dtypes[i]);
    }
    return 0;
}

/* --- What Python calls. */

static struct tape *tape_of(PyObject *number) {
    long long wanted = PyLong_AsLongLong(number);
    struct tape *tape = open_with(wanted);
    if (tape == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "tape %lld is not open", wanted);
    }
    return tape;
}

static void free_all(struct tape *all) {
    for (size_t i = 0; i < all->asides_used; i++) {
        free(all->asides[i].contents);
    }
    free(all->asides);
    free(all->entries);
}

/* The place for a new tape: one without a tape, or with the one that has been resting longest; MOST_TAPES if there is none. The
 * caller holds the lock. */
static int free_place(void) {
    int oldest = MOST_TAPES;
    for (int place = 0; place < MOST_TAPES; place++) {
        if (!TAPES[place].open) {
            return place;
        }
        if (TAPES[place].resting && (oldest == MOST_TAPES || TAPES[place].resting < TAPES[oldest].resting)) {
            oldest = place;
        }
    }
    return oldest;
}

static PyObject *open_tape(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    pthread_mutex_lock(&LOCK);
    int place = free_place();
    if (place < MOST_TAPES) {
        free_all(&TAPES[place]); /* of a resting tape */
        pthread_cond_broadcast(&TURNED);
        int64_t before = TAPES[place].number;
        memset(&TAPES[place], 0, sizeof TAPES[place]);
        TAPES[place].number = before ? before + MOST_TAPES : MOST_TAPES + place;
        TAPES[place].open = 1;
    }
    pthread_mutex_unlock(&LOCK);
    if (place == MOST_TAPES) {
        return PyErr_Format(PyExc_RuntimeError, "all %d tapes are open", MOST_TAPES);
    }
    return PyLong_FromLongLong(TAPES[place].number);
}

static PyObject *set_up(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    struct tape *tape = count == 5 ? tape_of(args[0]) : NULL;
    if (tape == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "set_up takes 5 arguments, not %zd", count);
    }
    double narrow = PyFloat_AsDouble(args[1]), wide = PyFloat_AsDouble(args[2]);
    long wanted = PyLong_AsLong(args[3]);
    int counting = PyObject_IsTrue(args[4]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    tape->bounds[FLOAT32] = tape->bounds[BFLOAT16] = tape->bounds[FLOAT16] = narrow;
    tape->bounds[FLOAT64] = tape->bounds[INT64] = wide;
    tape->wanted = (int)wanted;
    tape->counting = counting;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *bound(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    struct tape *tape = count == 2 ? tape_of(args[0]) : NULL;
    if (tape == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "bound takes 2 arguments, not %zd", count);
    }
    long long most = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    tape->most_forwards = most;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *turn(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    struct tape *tape = count == 2 ? tape_of(args[0]) : NULL;
    if (tape == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "turn takes 2 arguments, not %zd", count);
    }
    int on = PyObject_IsTrue(args[1]);
    if (on < 0) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    tape->on = on;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

/* Takes everything from a tape, under the lock; the caller frees it. */
static struct tape taken(struct tape *tape) {
    pthread_mutex_lock(&LOCK);
    struct tape all = *tape;
    tape->entries = NULL;
    tape->asides = NULL;
    tape->used = tape->room = tape->asides_used = tape->asides_room = tape->kept = 0;
    tape->dropped = 0;
    tape->forwards = 0;
    pthread_mutex_unlock(&LOCK);
    return all;
}

static PyObject *drain(PyObject *module, PyObject *number) {
    (void)module;
    struct tape *tape = tape_of(number);
    if (tape == NULL) {
        return NULL;
    }
    struct tape all = taken(tape);
    PyObject *entries = PyBytes_FromStringAndSize((const char *)all.entries, (Py_ssize_t)(all.used * sizeof(struct entry)));
    PyObject *asides = PyList_New(0);
    for (size_t i = 0; entries != NULL && asides != NULL && i < all.asides_used; i++) {
        PyObject *one = PyBytes_FromStringAndSize(all.asides[i].contents, (Py_ssize_t)all.asides[i].bytes);
        if (one == NULL || PyList_Append(asides, one) < 0) {
            Py_CLEAR(asides);
        }
        Py_XDECREF(one);
    }
    free_all(&all);
    PyObject *found = entries != NULL && asides != NULL ? Py_BuildValue("OOL", entries, asides, (long long)all.dropped) : NULL;
    Py_XDECREF(entries);
    Py_XDECREF(asides);
    return found;
}

static PyObject *close_tape(PyObject *module, PyObject *number) {
    (void)module;
    long long wanted = PyLong_AsLongLong(number);
    struct tape *tape = open_with(wanted);
    if (tape == NULL) { /* it was replaced */
        if (PyErr_Occurred()) {
            return NULL;
        }
        Py_RETURN_NONE;
    }
    pthread_mutex_lock(&LOCK);
    tape->open = tape->on = 0;
    pthread_cond_broadcast(&TURNED);
    pthread_mutex_unlock(&LOCK);
    struct tape all = taken(tape);
    free_all(&all);
    Py_RETURN_NONE;
}

/* Compiled code may still know the number of a tape that a new one replaces. Its entries are dropped. */
static PyObject *rest(PyObject *module, PyObject *number) {
    (void)module;
    static int64_t last = 0;
    struct tape *tape = tape_of(number);
    if (tape == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    tape->on = 0;
    tape->resting = ++last;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *wake(PyObject *module, PyObject *number) {
    (void)module;
    long long wanted = PyLong_AsLongLong(number);
    if (PyErr_Occurred()) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    struct tape *tape = open_with(wanted);
    if (tape != NULL) {
        tape->resting = 0;
    }
    pthread_mutex_unlock(&LOCK);
    return PyBool_FromLong(tape != NULL);
}

/* Waits without the GIL. */
static PyObject *wait_for_turn(PyObject *module, PyObject *number) {
    (void)module;
    struct tape *tape = tape_of(number);
    if (tape == NULL) {
        return NULL;
    }
    int64_t wanted = tape->number;
    int ended;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&LOCK);
    while (open_with(wanted) != NULL && !tape->turns && !tape->stopped) {
        pthread_cond_wait(&TURNED, &LOCK);
    }
    ended = open_with(wanted) != NULL && !tape->stopped;
    if (open_with(wanted) != NULL) {
        tape->turns = tape->stopped = 0;
    }
    pthread_mutex_unlock(&LOCK);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(ended);
}

static PyObject *stop_waiting(PyObject *module, PyObject *number) {
    (void)module;
    struct tape *tape = tape_of(number);
    if (tape == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&LOCK);
    tape->stopped = 1;
    pthread_cond_broadcast(&TURNED);
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"open_tape", open_tape, METH_NOARGS, "open_tape() -> the number of a new tape."},
    {"wait_for_turn", wait_for_turn, METH_O, "wait_for_turn(tape) -> whether a turn has ended; False once the waiting was stopped."},
    {"stop_waiting", stop_waiting, METH_O, "stop_waiting(tape): the thread in `wait_for_turn` returns."},
    {"set_up", (PyCFunction)(void (*)(void))set_up, METH_FASTCALL,
     "set_up(tape, narrow, wide, wanted, magnitudes): the bounds of small elements, of float64 and of others, and what is measured."},
    {"turn", (PyCFunction)(void (*)(void))turn, METH_FASTCALL, "turn(tape, on): whether gated slots make entries."},
    {"bound", (PyCFunction)(void (*)(void))bound, METH_FASTCALL,
     "bound(tape, most): of forwards that no backward follows, fewer than twice as many are kept; 0 for no bound."},
    {"drain", drain, METH_O,
     "drain(tape) -> (entries, elements or histograms of those that have them, the last number of dropped entries or 0). The tape is "
     "empty then."},
    {"rest", rest, METH_O, "rest(tape): no gated entries from now on, and a new tape may replace it if there is no other place."},
    {"wake", wake, METH_O, "wake(tape) -> whether a tape that rested is still there. It then rests no more."},
    {"close_tape", close_tape, METH_O, "close_tape(tape): no entries from now on, not even from operators that were called before."},
    {NULL, NULL, 0, NULL},
};

static void lock_all(void) {
    pthread_mutex_lock(&LOCK);
}

static void unlock_all(void) {
    pthread_mutex_unlock(&LOCK);
}

static int prepare(PyObject *module) {
    pthread_atfork(lock_all, unlock_all, unlock_all); /* no child begins with the lock of a thread that it does not have */
    KERNEL = PyCapsule_Import(KERNEL_CAPSULE, 0);
    if (KERNEL == NULL || KERNEL->columns != ROW) {
        PyErr_SetString(PyExc_ImportError, "the tape and the host kernel are of different builds");
        return -1;
    }
    PyObject *dtypes = PyList_New(0);
    for (int i = 0; dtypes != NULL && i < DTYPE_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(DTYPES[i].name);
        if (name == NULL || PyList_Append(dtypes, name) < 0) {
            Py_CLEAR(dtypes);
        }
        Py_XDECREF(name);
    }
    int added = dtypes == NULL ? -1 : PyModule_AddObjectRef(module, "DTYPES", dtypes);
    Py_XDECREF(dtypes);
    return added || PyModule_AddIntConstant(module, "MEASURED", MEASURED) ||
           PyModule_AddIntConstant(module, "SET_ASIDE", SET_ASIDE) || PyModule_AddIntConstant(module, "GATED", GATED) ||
           PyModule_AddIntConstant(module, "CHECKED", CHECKED) || PyModule_AddIntConstant(module, "MARK", MARK) ||
           PyModule_AddIntConstant(module, "TURN", TURN) || PyModule_AddIntConstant(module, "FORWARD", FORWARD) ||
           PyModule_AddIntConstant(module, "BACKWARD", BACKWARD) ||
           PyModule_AddIntConstant(module, "MOST_DIMENSIONS", MOST_DIMENSIONS) || PyModule_AddIntConstant(module, "ROW", ROW);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, prepare},
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_tape", "Measurements that MindSpore's executor makes.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tape(void) {
    return PyModuleDef_Init(&MODULE);
}
