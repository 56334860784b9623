/* A library to preload: faults of the file system below one directory, and a clock that jumps.
 *
 * DRILL_PLACE is the directory, DRILL_CONTROL a file of three numbers of 64 bits, which may change at any moment:
 * the faults (see below), microseconds that a slow call takes, and seconds that the wall clock is ahead. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { FULL = 1, NO_FILES = 2, READ_ONLY = 4, ERRORS = 8, SLOW = 16, HANGS = 32 };
enum { MOST_DESCRIPTORS = 4096 };

static volatile int64_t *control;
static const char *place;
static char ours[MOST_DESCRIPTORS];
static __thread unsigned drawn = 1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DRILL_CONTROL");
    place = getenv("DRILL_PLACE");
    int file = path == NULL || place == NULL ? -1 : REAL(open)(path, O_RDWR);
    void *found = file < 0 ? MAP_FAILED : mmap(NULL, 3 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    control = found == MAP_FAILED ? NULL : found;
    if (file >= 0) {
        close(file);
    }
}

static int is_below(const char *path) {
    char whole[PATH_MAX];
    if (control == NULL || path == NULL) {
        return 0;
    }
    if (path[0] != '/') {
        if (getcwd(whole, sizeof whole) == NULL || strlen(whole) + strlen(path) + 2 > sizeof whole) {
            return 0;
        }
        strcat(strcat(whole, "/"), path);
        path = whole;
    }
    return strncmp(path, place, strlen(place)) == 0;
}

static int is_ours(int descriptor) {
    return descriptor >= 0 && descriptor < MOST_DESCRIPTORS && ours[descriptor];
}

/* Whether a call fails, with errno set. `creates`: it makes or replaces a file; `writes`: it stores something. */
static int fails(int creates, int writes) {
    int64_t faults = control[0];
    if (faults & SLOW) {
        usleep((useconds_t)control[1]);
    }
    while (control[0] & HANGS) {
        usleep(10000);
    }
    if ((faults & ERRORS) && (drawn = drawn * 1103515245u + 12345u) >> 16 & 1) {
        errno = EIO;
        return 1;
    }
    if ((faults & READ_ONLY) && (creates || writes)) {
        errno = EROFS;
        return 1;
    }
    if (((faults & FULL) && writes) || ((faults & NO_FILES) && creates)) {
        errno = ENOSPC;
        return 1;
    }
    return 0;
}

static int opened(const char *path, int descriptor) {
    if (descriptor >= 0 && descriptor < MOST_DESCRIPTORS) {
        ours[descriptor] = (char)is_below(path);
    }
    return descriptor;
}

#define OPENING(name, parameters, arguments)                                                                                              \
    int name parameters {                                                                                                                 \
        va_list more;                                                                                                                     \
        va_start(more, flags);                                                                                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                                           \
        va_end(more);                                                                                                                     \
        if (is_below(path) && fails(flags & O_CREAT, (flags & O_ACCMODE) != O_RDONLY && (control[0] & READ_ONLY))) {                      \
            return -1;                                                                                                                    \
        }                                                                                                                                 \
        return opened(path, REAL(name) arguments);                                                                                        \
    }

#define OPEN(name) OPENING(name, (const char *path, int flags, ...), (path, flags, mode))
#define OPEN_AT(name) OPENING(name, (int directory, const char *path, int flags, ...), (directory, path, flags, mode))

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)

int close(int descriptor) {
    if (descriptor >= 0 && descriptor < MOST_DESCRIPTORS) {
        ours[descriptor] = 0;
    }
    return REAL(close)(descriptor);
}

#define WRITE(name, parameters, arguments)                                                                                                \
    ssize_t name parameters { return is_ours(descriptor) && fails(0, 1) ? -1 : REAL(name) arguments; }

WRITE(write, (int descriptor, const void *from, size_t size), (descriptor, from, size))
WRITE(writev, (int descriptor, const struct iovec *from, int count), (descriptor, from, count))
WRITE(pwrite, (int descriptor, const void *from, size_t size, off_t at), (descriptor, from, size, at))
WRITE(pwrite64, (int descriptor, const void *from, size_t size, off64_t at), (descriptor, from, size, at))
WRITE(pwritev, (int descriptor, const struct iovec *from, int count, off_t at), (descriptor, from, count, at))
WRITE(pwritev64, (int descriptor, const struct iovec *from, int count, off64_t at), (descriptor, from, count, at))
WRITE(pwritev2, (int descriptor, const struct iovec *from, int count, off_t at, int flags), (descriptor, from, count, at, flags))
WRITE(pwritev64v2, (int descriptor, const struct iovec *from, int count, off64_t at, int flags), (descriptor, from, count, at, flags))

int fsync(int descriptor) {
    return is_ours(descriptor) && fails(0, 1) ? -1 : REAL(fsync)(descriptor);
}

int rename(const char *from, const char *to) {
    return is_below(to) && fails(0, control[0] & READ_ONLY) ? -1 : REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    return is_below(path) && fails(1, 1) ? -1 : REAL(mkdir)(path, mode);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = REAL(clock_gettime)(clock, now);
    if (status == 0 && clock == CLOCK_REALTIME && control != NULL) {
        now->tv_sec += (time_t)control[2];
    }
    return status;
}
