/* Histograms of magnitudes. Included by host_kernel.c.
 *
 * Adding the greatest mantissa to the bits of a magnitude, before the mantissa is shifted out, counts a power of two to the numbers
 * below it: it is the upper end of its bin.
 *
 * Nearly all exponents of a tensor lie in a window of 31 of them. An exponent in it is a word with one bit set, and words are
 * counted by logic, 16 side by side: three bits of equal weight add to one of that weight and one of twice that, in each of the
 * word's places at once. What lies outside, and is not 0, is counted in tables. */

#define EXPONENTS 257 /* 0: zeros. INFINITE: magnitudes above 2^127, and Inf. The last one: NaN. */
#define INFINITE 255
#define COUNTED EXPONENTS /* in place of an exponent: the element is counted already */
#define TABLES 8      /* An increment waits for the last one of the same counter, so neighbours count in different tables. */
#define WINDOW 31     /* The last bit of a word says that its exponent lies outside. */
#define HEADROOM 2    /* exponents of a window above the greatest one of the elements that it was chosen by */
#define USUAL 97      /* where a window begins that is chosen by zeros: it ends with magnitudes of 1 */
#define LARGE ((size_t)1 << 14) /* the least number of elements that pay for a window */
#define FEW 128       /* Windows are used while at most one in so many elements lies outside. */
#define SHARE 4       /* Another window is chosen by a piece of which more than one in so many lies outside. */
#define GROUP ((size_t)8 * LANES)
#define LEVELS 18     /* enough for the groups of so many elements: */
#define MOST ((size_t)1 << 24) /* elements after which counters are added up, so that none overflows */
#define BINS 284

/* The bits of the greatest magnitude of each bin, ascending: monitor/stats/histograms.py has the list. All powers of two are among
 * them. The last bin is for magnitudes beyond float32. */
static uint32_t ENDS[BINS];

static INLINE uint32_t exponent_of(const unsigned char *piece, size_t j) {
    return (magnitude_bits(piece, j) + 0x7fffffu) >> 23;
}

/* Counters of the exponents from `low` on, bit b for exponent low + b. A bit of sum[l] is worth 2^l elements, and a bit of full[l]
 * and of waiting[l] 8 times as many: groups wait for another one of their level. */
typedef struct {
    _Alignas(64) uint32_t sum[3][LANES];
    uint32_t full[LEVELS][LANES], waiting[LEVELS][LANES];
    uint32_t low, groups; /* The bits of the number of groups say at which levels one waits. */
} window;

typedef struct {
    uint32_t counts[TABLES][EXPONENTS + 1];
} tables;

typedef struct {
    int64_t counts[EXPONENTS];
    tables tables;
    window window;
    size_t seen, missed, waiting; /* elements; those that windows did not hold; those since `counts` was added to */
    int large, tabled;            /* `tabled`: whether tables are in use; else their contents are undefined */
} histogram;

/* Adds a and b to sum. Returns the carry: where a differs from the sum before, it is b, and elsewhere a. */
static INLINE uint32_t add_bits(uint32_t *sum, uint32_t a, uint32_t b) {
    uint32_t differs = *sum ^ a;
    *sum = differs ^ b;
    return (differs & b) | (~differs & a);
}

static INLINE uint32_t in_window(const unsigned char *piece, size_t j, uint32_t low) {
    uint32_t place = (magnitude_bits(piece, j) + 0x7fffffu - (low << 23)) >> 23; /* below the window it wraps around */
    return place < WINDOW ? place : WINDOW;
}

/* Counts elements of one group. Sets bits of `any` in those places of the window, or beyond it, that have any. */
static INLINE void add_group(window *restrict w, const unsigned char *restrict group, uint32_t *restrict any) {
    uint32_t carried[LANES], low = w->low;
    int level = 0;
    for (int k = 0; k < LANES; k++) {
        uint32_t ones = w->sum[0][k], twos = w->sum[1][k], fours = w->sum[2][k], found = any[k], pairs[4], quads[2];
        for (int i = 0; i < 4; i++) {
            uint32_t word = (uint32_t)1 << in_window(group, 2 * i * LANES + k, low);
            uint32_t next = (uint32_t)1 << in_window(group, (2 * i + 1) * LANES + k, low);
            pairs[i] = add_bits(&ones, word, next);
            found |= word | next;
        }
        quads[0] = add_bits(&twos, pairs[0], pairs[1]);
        quads[1] = add_bits(&twos, pairs[2], pairs[3]);
        carried[k] = add_bits(&fours, quads[0], quads[1]);
        w->sum[0][k] = ones;
        w->sum[1][k] = twos;
        w->sum[2][k] = fours;
        any[k] = found;
    }
    for (uint32_t others = w->groups; others & 1; others >>= 1, level++) {
#pragma GCC unroll 1 /* else gcc keeps the words in 16 registers, not in vectors */
        for (int k = 0; k < LANES; k++) {
            carried[k] = add_bits(&w->full[level][k], w->waiting[level][k], carried[k]);
        }
    }
    if (w->groups++ >> level == 0) { /* the first one of this level */
        memset(w->full[level], 0, sizeof w->full[level]);
    }
    memcpy(w->waiting[level], carried, sizeof carried);
}

/* Adds numbers of `levels` words, bit by bit as above, to one of more. */
static INLINE void add_numbers(uint32_t *sum, const uint32_t *number, int levels, int most) {
    uint32_t carry = 0;
    for (int level = 0; level < most; level++) {
        carry = add_bits(&sum[level], level < levels ? number[level] : 0, carry);
    }
}

/* Adds to `counts`, and leaves a window that is not chosen. */
static INLINE void empty_window(window *w, int64_t *counts) {
    if (!w->groups) {
        return;
    }
    uint32_t total[3 + LEVELS + 5] = {0}, found[WINDOW + 1] = {0}; /* 5: the carries of 16 lanes, twice */
    int levels = 0;
    while (w->groups >> levels) {
        levels++;
    }
    for (int k = 0; k < LANES; k++) {
        uint32_t number[3 + LEVELS];
        for (int level = 0; level < 3; level++) {
            number[level] = w->sum[level][k];
        }
        for (int level = 0; level < levels; level++) {
            number[3 + level] = w->full[level][k];
        }
        add_numbers(total, number, 3 + levels, 3 + levels + 5);
        for (int level = 0; level < levels; level++) {
            number[3 + level] = w->groups >> level & 1 ? w->waiting[level][k] : 0;
        }
        add_numbers(total + 3, number + 3, levels, levels + 5);
    }
    for (int level = 0; level < 3 + levels + 5; level++) {
        for (int b = 0; b < WINDOW + 1; b++) {
            found[b] += (total[level] >> b & 1) << level;
        }
    }
    for (uint32_t b = 0; b < WINDOW && w->low + b < EXPONENTS; b++) {
        counts[w->low + b] += found[b];
    }
    memset(w->sum, 0, sizeof w->sum);
    w->low = w->groups = 0;
}

/* Lets the window begin where it holds the greatest finite elements of some groups. */
static INLINE void choose_window(window *w, const unsigned char *piece, size_t count) {
    uint32_t greatest[LANES] = {0}, bits = 0;
    for (size_t j = 0; j < count; j += LANES) {
        for (int k = 0; k < LANES; k++) {
            uint32_t magnitude = magnitude_bits(piece, j + k), finite = magnitude < 0x7f800000u ? magnitude : 0;
            greatest[k] = finite > greatest[k] ? finite : greatest[k];
        }
    }
    for (int k = 0; k < LANES; k++) {
        bits = greatest[k] > bits ? greatest[k] : bits;
    }
    uint32_t end = (bits >> 23) + 2 + HEADROOM; /* after the greatest exponent, of which the bits may be one less */
    w->low = bits == 0 ? USUAL : end > WINDOW ? end - WINDOW : 1; /* never 0: zeros are counted apart */
}

/* Counts all groups of a piece that lie in the window, and zeros. Returns how many elements are left, and not 0. */
static INLINE size_t count_groups(window *w, const unsigned char *piece, size_t count, int64_t *counts) {
    uint32_t any[LANES] = {0}, outside = 0, zeros = 0, left = 0;
    for (size_t j = 0; j < count; j += GROUP) {
        fetch_ahead_of(piece + 4 * j, 4 * GROUP);
        add_group(w, piece + 4 * j, any);
    }
    for (int k = 0; k < LANES; k++) {
        outside |= any[k] >> WINDOW;
    }
    for (size_t j = 0; outside && j < count; j++) {
        zeros += magnitude_bits(piece, j) == 0;
        left += in_window(piece, j, w->low) == WINDOW;
    }
    counts[0] += zeros;
    return left - zeros;
}

static INLINE tables *tables_of(histogram *of) {
    if (!of->tabled) {
        memset(&of->tables, 0, sizeof of->tables);
        of->tabled = 1;
    }
    return &of->tables;
}

static INLINE void add_to_tables(tables *t, const uint16_t *exponents, size_t count) {
    size_t j = 0;
    for (; j + TABLES <= count; j += TABLES) {
        for (size_t k = 0; k < TABLES; k++) {
            t->counts[k][exponents[j + k]]++;
        }
    }
    for (; j < count; j++) {
        t->counts[0][exponents[j]]++;
    }
}

/* Counts those elements of some groups that lie outside the window, and are not 0. */
static INLINE void count_outside(tables *t, const unsigned char *piece, size_t count, uint32_t low) {
    uint16_t exponents[PIECE];
    for (size_t k = 0; k < count; k++) {
        int done = in_window(piece, k, low) < WINDOW || magnitude_bits(piece, k) == 0;
        exponents[k] = done ? COUNTED : (uint16_t)exponent_of(piece, k);
    }
    for (size_t j = 0; j < count; j += TABLES) {
        uint64_t pair[2];
        memcpy(pair, exponents + j, sizeof pair);
        if ((pair[0] & pair[1]) != COUNTED * 0x0001000100010001u) {
            add_to_tables(t, exponents + j, TABLES);
        }
    }
}

/* Counts elements in tables. */
static INLINE void count_in_tables(tables *t, const unsigned char *piece, size_t count) {
    uint16_t exponents[PIECE];
    for (size_t k = 0; k < count; k++) {
        exponents[k] = (uint16_t)exponent_of(piece, k);
    }
    add_to_tables(t, exponents, count);
}

/* Counts groups of elements by a window. Returns how many of them it does not hold, other than zeros. */
static INLINE size_t count_by_window(histogram *to, const unsigned char *piece, size_t count) {
    if (!to->window.low) {
        choose_window(&to->window, piece, count);
    }
    size_t left = count_groups(&to->window, piece, count, to->counts);
    if (left) {
        count_outside(tables_of(to), piece, count, to->window.low);
    }
    if (SHARE * left > count) {
        empty_window(&to->window, to->counts);
        choose_window(&to->window, piece, count); /* not by the next piece, which may be zeros again */
    }
    return left;
}

static void begin_counts(histogram *to, size_t n) {
    memset(to->counts, 0, sizeof to->counts);
    memset(to->window.sum, 0, sizeof to->window.sum);
    to->window.low = to->window.groups = 0;
    to->seen = to->missed = to->waiting = 0;
    to->tabled = 0;
    to->large = n >= LARGE;
}

/* Adds what the window and the tables hold to `counts`. */
static void settle_counts(histogram *to) {
    empty_window(&to->window, to->counts);
    for (int k = 0; to->tabled && k < TABLES; k++) {
        for (int j = 0; j < EXPONENTS; j++) {
            to->counts[j] += to->tables.counts[k][j];
        }
    }
    to->tabled = 0;
    to->waiting = 0;
}

/* Counts elements, of which only the last piece of an array is no multiple of a group. `grouping`: whether vectors can shift each
 * element by a number of its own. */
static INLINE void count_piece(histogram *to, const unsigned char *x, size_t n, int grouping) {
    for (size_t i = 0; i < n; i += PIECE) {
        const unsigned char *piece = x + 4 * i;
        size_t count = n - i > PIECE ? PIECE : n - i, grouped = 0;
        if (grouping && to->large && to->missed <= to->seen / FEW + PIECE) {
            grouped = count / GROUP * GROUP;
            to->missed += count_by_window(to, piece, grouped);
        }
        if (grouped < count) {
            count_in_tables(tables_of(to), piece + 4 * grouped, count - grouped);
        }
        to->seen += count;
        to->waiting += count;
        if (to->waiting >= MOST - PIECE) { /* no counter overflows */
            settle_counts(to);
        }
    }
}

/* The number of elements whose magnitude has bits above `low`, and at most `high`. */
static INLINE size_t within_format(const unsigned char *x, size_t n, enum format format, uint32_t low, uint32_t high) {
    size_t found = 0;
    for (size_t i = 0; i < n;) {
        float widened[PIECE];
        size_t count = n - i > PIECE ? PIECE : n - i;
        uint32_t here = 0;
        const unsigned char *piece = piece_float(x, i, count, format, widened);
        for (size_t j = 0; j < count; j++) {
            here += magnitude_bits(piece, j) - low - 1 < high - low; /* modulo 2^32: one comparison for both ends */
        }
        found += here;
        i += count;
    }
    return found;
}

static INLINE size_t count_within(const void *x, size_t n, enum format format, uint32_t low, uint32_t high) {
    switch (format) { /* a separate loop per format, in which the format is a constant */
    case FLOAT32: return within_format(x, n, FLOAT32, low, high);
    case BFLOAT16: return within_format(x, n, BFLOAT16, low, high);
    default: return within_format(x, n, FLOAT16, low, high);
    }
}

/* Writes the elements of each bin, of BINS. Nearly all exponents have a bin of their own. Where several bins divide one, its
 * elements are looked for in another read, if there are any. */
static INLINE void write_bins(const histogram *from, const void *x, size_t n, enum format format, double *bins) {
    size_t bin = 1;
    bins[0] = (double)from->counts[0];
    for (uint32_t exponent = 1; exponent <= INFINITE; exponent++) {
        uint32_t end = exponent << 23;
        int64_t left = from->counts[exponent];
        if (left && exponent == INFINITE) {
            left -= (int64_t)count_within(x, n, format, end - 1, end);
        }
        for (; ENDS[bin] < end; bin++) {
            size_t inside = left ? count_within(x, n, format, ENDS[bin - 1], ENDS[bin]) : 0;
            bins[bin] = (double)inside;
            left -= (int64_t)inside;
        }
        bins[bin++] = (double)left;
    }
    bins[bin] = 0.0; /* the last one */
}

static INLINE void count_format(const unsigned char *x, size_t n, enum format format, int grouping, double *bins) {
    histogram counts;
    begin_counts(&counts, n);
    for (size_t i = 0; i < n; i += PIECE) {
        float widened[PIECE];
        size_t count = n - i > PIECE ? PIECE : n - i;
        count_piece(&counts, piece_float(x, i, count, format, widened), count, grouping);
    }
    settle_counts(&counts);
    write_bins(&counts, x, n, format, bins);
}

/* The histogram alone, of elements of which nothing else is measured. */
static INLINE void count_magnitudes(const void *x, size_t n, enum format format, int grouping, double *bins) {
    switch (format) { /* a separate loop per format, in which the format is a constant */
    case FLOAT32: count_format(x, n, FLOAT32, grouping, bins); break;
    case BFLOAT16: count_format(x, n, BFLOAT16, grouping, bins); break;
    default: count_format(x, n, FLOAT16, grouping, bins);
    }
}
