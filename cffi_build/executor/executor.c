/* Replays plans in shared memory.
 *
 * A rank writes only its own memory: results, its line in each bucket, its bell. It reads the
 * others'. Folds wait for counts in lines; whoever has nothing to do spins a little, gives the
 * processor away a few times, and then sleeps on the bell of a rank that it waits for.
 */

#include <stddef.h>
#include <stdint.h>

#include "executor/executor.h"
#include "kernels/kernels.h"

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <sched.h>
#include <time.h>
#endif

/* A missed ring costs no more than this; an abort is seen within it. */
#define NAP_NS 2000000L

static void nap(const uint32_t *word, uint32_t seen) {
    struct timespec pause = {0, NAP_NS};
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &pause, NULL, 0);
#else
    (void)word;
    (void)seen;
    nanosleep(&pause, NULL);
#endif
}

static void wake(uint32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

void p2pdpt_rouse(const p2pdpt_executor *executor) {
    for (uint32_t rank = 0; rank < executor->size; rank++) wake(&executor->bells[rank]->rings);
}

/* Tell of progress: only a sleeper costs a system call. The progress was stored before, and a
 * sleeper says that it sleeps before it looks a last time, both in one total order, so either it
 * sees the progress or it is seen here. */
static void announce(const p2pdpt_executor *executor) {
    p2pdpt_bell *own = executor->bells[executor->rank];
    for (uint32_t rank = 0; rank < executor->size; rank++) {
        if (rank == executor->rank) continue;
        if (__atomic_load_n(&executor->bells[rank]->sleeping, __ATOMIC_SEQ_CST)) {
            __atomic_fetch_add(&own->rings, 1, __ATOMIC_SEQ_CST);
            wake(&own->rings);
            return;
        }
    }
}

void p2pdpt_enter(const p2pdpt_executor *executor, p2pdpt_line *line, uint64_t number,
                  double weight) {
    line->weight = weight;
    __atomic_store_n(&line->entered, number, __ATOMIC_SEQ_CST);
    announce(executor);
}

static uint64_t counted(const p2pdpt_round *round, uint32_t rank) {
    return __atomic_load_n(&round->lines[rank]->count, __ATOMIC_SEQ_CST);
}

static size_t width_of(int dtype) {
    switch (dtype) {
    case P2PDPT_FLOAT64:
    case P2PDPT_INT64: return 8;
    case P2PDPT_BFLOAT16:
    case P2PDPT_FLOAT16:
    case P2PDPT_INT16: return 2;
    case P2PDPT_INT8:
    case P2PDPT_UINT8: return 1;
    default: return 4;
    }
}

/* Fold one segment. More sources than fit the stack are not planned: see native_driver.py. */
#define MOST_SOURCES 256

static void fold(const p2pdpt_executor *executor, const p2pdpt_round *round,
                 const p2pdpt_step *step, uint64_t offset, uint64_t length) {
    const void *sources[MOST_SOURCES];
    size_t stored = width_of(round->dtype);
    for (uint32_t index = 0; index < step->source_count; index++) {
        size_t width = step->wide && step->wide[index] ? sizeof(float) : stored;
        sources[index] = (const char *)step->sources[index] + offset * width;
    }
    char *out = (char *)step->out + offset * (step->out_wide ? sizeof(float) : stored);
    p2pdpt_fold(executor->path, round->dtype, step->combine, out, step->out_wide, sources,
                step->wide, step->scales, step->source_count, length, step->divide,
                step->divisor);
}

/* Advance one round; returns whether it moved, and in *blocker the rank that it waits for. */
static int advance(const p2pdpt_executor *executor, p2pdpt_round *round, uint32_t *blocker,
                   int *reason) {
    int moved = 0;
    if (round->state == 0) {
        int differ = 0;
        for (uint32_t rank = 0; rank < round->size; rank++) {
            const p2pdpt_line *line = round->lines[rank];
            if (__atomic_load_n(&line->entered, __ATOMIC_SEQ_CST) < round->number) {
                *blocker = rank;
                return 0;
            }
            differ |= line->weight != round->weights[rank];
        }
        if (differ) {
            for (uint32_t rank = 0; rank < round->size; rank++)
                round->weights[rank] = round->lines[rank]->weight;
            *reason = P2PDPT_WEIGHTS;
            return 1;
        }
        round->state = 1;
        round->finished = round->bases[round->rank];
        moved = 1;
    }
    p2pdpt_line *own = round->lines[round->rank];
    while (round->state == 1) {
        if (round->step == round->step_count) {
            round->state = 2;
            break;
        }
        const p2pdpt_step *step = &round->steps[round->step];
        uint64_t length = step->length - round->offset;
        if (length > executor->segment) length = executor->segment;
        uint64_t end = round->offset + length;
        for (uint32_t index = 0; index < step->wait_count; index++) {
            const p2pdpt_wait *wait = &step->waits[index];
            if (!wait->slope && round->offset) continue;
            uint64_t need = round->bases[wait->rank] + wait->need + (wait->slope ? end : 0);
            if (counted(round, wait->rank) < need) {
                *blocker = wait->rank;
                return moved;
            }
        }
        fold(executor, round, step, round->offset, length);
        moved = 1;
        round->offset = end;
        if (end == step->length) {
            round->finished += step->length;
            round->step++;
            round->offset = 0;
            __atomic_store_n(&own->count, round->finished, __ATOMIC_SEQ_CST);
            announce(executor);
        } else if (step->shared) {
            __atomic_store_n(&own->count, round->finished + end, __ATOMIC_SEQ_CST);
            announce(executor);
        }
        if (__atomic_load_n(executor->abort, __ATOMIC_RELAXED)) return 1;
    }
    if (round->state == 2) {
        /* Nobody may change its memory while others still read it. */
        for (uint32_t rank = 0; rank < round->size; rank++) {
            if (counted(round, rank) < round->bases[rank] + round->totals[rank]) {
                *blocker = rank;
                return moved;
            }
        }
        round->state = 3;
        *reason = P2PDPT_DONE;
        moved = 1;
    }
    return moved;
}

/* Try all rounds once; returns a reason, or IDLE after noting whether anything moved. */
static int try_all(const p2pdpt_executor *executor, p2pdpt_round *const *rounds, uint32_t count,
                   uint32_t *which, uint32_t *blocker, int *moved) {
    *moved = 0;
    for (uint32_t index = 0; index < count; index++) {
        int reason = P2PDPT_IDLE;
        *moved |= advance(executor, rounds[index], blocker, &reason);
        if (__atomic_load_n(executor->abort, __ATOMIC_SEQ_CST)) return P2PDPT_ABORTED;
        if (reason != P2PDPT_IDLE) {
            *which = index;
            return reason;
        }
    }
    return P2PDPT_IDLE;
}

int p2pdpt_advance(const p2pdpt_executor *executor, p2pdpt_round *const *rounds, uint32_t count,
                   uint32_t *which) {
    p2pdpt_bell *own = executor->bells[executor->rank];
    uint32_t idle = 0;
    if (!count) return P2PDPT_IDLE;
    for (;;) {
        uint32_t blocker = executor->rank;
        int moved;
        int reason = try_all(executor, rounds, count, which, &blocker, &moved);
        if (reason != P2PDPT_IDLE) return reason;
        if (__atomic_load_n(executor->poke, __ATOMIC_SEQ_CST)) return P2PDPT_POKED;
        if (moved) {
            idle = 0;
            continue;
        }
        idle++;
        if (idle <= executor->spins) {
            relax();
            continue;
        }
        if (idle <= executor->spins + executor->yields) {
            sched_yield();
            continue;
        }
        if (executor->brief) return P2PDPT_LATE;
        uint32_t *rings = &executor->bells[blocker]->rings;
        uint32_t seen = __atomic_load_n(rings, __ATOMIC_SEQ_CST);
        __atomic_store_n(&own->sleeping, 1, __ATOMIC_SEQ_CST);
        /* A last look: who advanced before seeing that we sleep has been seen by us now. */
        reason = try_all(executor, rounds, count, which, &blocker, &moved);
        int leave = reason != P2PDPT_IDLE || moved ||
                    __atomic_load_n(executor->poke, __ATOMIC_SEQ_CST);
        if (!leave) nap(rings, seen);
        __atomic_store_n(&own->sleeping, 0, __ATOMIC_SEQ_CST);
        if (reason != P2PDPT_IDLE) return reason;
    }
}
