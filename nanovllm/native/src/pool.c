// A pool of threads. The chunks of a run are divided into one range for each thread, in which it takes one chunk after
// the other: neighbours in memory, which the CPU loads ahead of time. A thread whose range is done takes from those of
// others. Chunks are counted when they are finished. No thread waits for a thread that has no chunk: a worker that the
// system does not schedule delays nobody, and finds nothing to do when it comes late.
//
// The job (`work`, `arg`, `num_chunks`) needs no lock. It is written only when no chunk is left unfinished, before any
// `remaining` is set; and read only after a chunk was taken from a `remaining`, which keeps the run unfinished.
#define _POSIX_C_SOURCE 200809L
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

// How long a thread waits awake before it sleeps. Longer than the gaps between the runs of one step.
enum { SPIN_NANOSECONDS = 50 * 1000, CACHE_LINE = 64 };

typedef struct {
    _Alignas(CACHE_LINE) atomic_int remaining;  // chunks of its range that nobody has taken; at most 0: none
    struct Pool *pool;
    pthread_t thread;
} Thread;

struct Pool {
    void (*work)(void *arg, int chunk);
    void *arg;
    int num_chunks;
    _Alignas(CACHE_LINE) atomic_int unfinished;  // chunks whose call has not returned
    // Each sleeper announces itself before it looks at its counter a last time; who changes the counter looks for
    // sleepers afterwards. All four are sequentially consistent, so that one of the two sees the other.
    _Alignas(CACHE_LINE) atomic_int sleeping_workers;
    atomic_bool sleeping_caller;
    atomic_bool stop;
    pthread_mutex_t mutex;
    pthread_cond_t work_arrived;
    pthread_cond_t work_finished;
    int num_threads;   // the caller, who is the first, and the workers that were asked for
    int num_workers;   // that could be started
    Thread threads[];
};

static long long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static bool has_work(Pool *pool) {
    for (int i = 0; i < pool->num_threads; i++)
        if (atomic_load(&pool->threads[i].remaining) > 0) return true;
    return atomic_load(&pool->stop);
}

static bool has_finished(Pool *pool) { return atomic_load(&pool->unfinished) == 0; }

// Wait awake for a short time; whether the condition came true.
static bool spin_until(bool (*condition)(Pool *), Pool *pool) {
    if (condition(pool)) return true;
    long long end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        relax();
        if (condition(pool)) return true;
    } while (nanoseconds() < end);
    return false;
}

static void wake(Pool *pool, pthread_cond_t *sleepers) {
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(sleepers);
    pthread_mutex_unlock(&pool->mutex);
}

// The first chunk of a range.
static int range_begin(const Pool *pool, int range) {
    return (int)((long long)pool->num_chunks * range / pool->num_threads);
}

// Work on the chunks of a range until none is left.
static void work_on_range(Pool *pool, int range) {
    atomic_int *remaining = &pool->threads[range].remaining;
    while (atomic_load(remaining) > 0) {
        int left = atomic_fetch_sub(remaining, 1);
        if (left <= 0) return;
        pool->work(pool->arg, range_begin(pool, range + 1) - left);
        bool last = atomic_fetch_sub(&pool->unfinished, 1) == 1;
        if (last && atomic_load(&pool->sleeping_caller)) wake(pool, &pool->work_finished);
    }
}

// Work on the own range first, then on all others.
static void work_on_chunks(Pool *pool, int own) {
    for (int i = 0; i < pool->num_threads; i++) work_on_range(pool, (own + i) % pool->num_threads);
}

static void sleep_until_work(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleeping_workers, 1);
    while (!has_work(pool)) pthread_cond_wait(&pool->work_arrived, &pool->mutex);
    atomic_fetch_sub(&pool->sleeping_workers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void sleep_until_finished(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->sleeping_caller, true);
    while (!has_finished(pool)) pthread_cond_wait(&pool->work_finished, &pool->mutex);
    atomic_store(&pool->sleeping_caller, false);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker(void *argument) {
    Thread *self = argument;
    Pool *pool = self->pool;
    while (!atomic_load(&pool->stop)) {
        work_on_chunks(pool, (int)(self - pool->threads));
        if (!spin_until(has_work, pool)) sleep_until_work(pool);
    }
    return NULL;
}

Pool *pool_create(int num_threads) {
    if (num_threads < 1) num_threads = 1;
    size_t size = sizeof(Pool) + (size_t)num_threads * sizeof(Thread);
    Pool *pool = aligned_alloc(CACHE_LINE, (size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!pool) return NULL;
    *pool = (Pool){.num_threads = num_threads};
    for (int i = 0; i < num_threads; i++) pool->threads[i] = (Thread){.pool = pool};
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work_arrived, NULL);
    pthread_cond_init(&pool->work_finished, NULL);
    sigset_t all, before;  // workers block all signals, so that Ctrl-C interrupts the main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->num_workers < num_threads - 1) {
        Thread *next = &pool->threads[pool->num_workers + 1];
        if (pthread_create(&next->thread, NULL, worker, next) != 0) break;
        pool->num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

int pool_num_threads(const Pool *pool) { return pool->num_workers + 1; }

void pool_run(Pool *pool, void (*work)(void *arg, int chunk), void *arg, int num_chunks) {
    if (num_chunks <= 1 || pool->num_workers == 0) {
        for (int chunk = 0; chunk < num_chunks; chunk++) work(arg, chunk);
        return;
    }
    pool->work = work;
    pool->arg = arg;
    pool->num_chunks = num_chunks;
    atomic_store(&pool->unfinished, num_chunks);
    for (int i = 0; i < pool->num_threads; i++)
        atomic_store(&pool->threads[i].remaining, range_begin(pool, i + 1) - range_begin(pool, i));
    if (atomic_load(&pool->sleeping_workers) > 0) wake(pool, &pool->work_arrived);
    work_on_chunks(pool, 0);
    if (!spin_until(has_finished, pool)) sleep_until_finished(pool);
}

void pool_destroy(Pool *pool) {
    atomic_store(&pool->stop, true);
    wake(pool, &pool->work_arrived);
    for (int i = 1; i <= pool->num_workers; i++) pthread_join(pool->threads[i].thread, NULL);
    pthread_cond_destroy(&pool->work_finished);
    pthread_cond_destroy(&pool->work_arrived);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}
