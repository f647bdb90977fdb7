// A pool of threads that share the chunks of one piece of work at a time.
#ifndef NANOVLLM_POOL_H
#define NANOVLLM_POOL_H

typedef struct Pool Pool;

// A pool of `num_threads` threads: the caller of pool_run and num_threads - 1 workers, fewer where the system refuses
// to start more. NULL when memory runs out. A forked child must not use its parent's pool.
Pool *pool_create(int num_threads);

// Threads that work in pool_run, the caller included.
int pool_num_threads(const Pool *pool);

// Call work(arg, chunk) once for every chunk in 0 .. num_chunks - 1, in any order, on the caller and the workers.
// Returns when all calls have returned. One pool_run per pool at a time, and none from inside `work`.
void pool_run(Pool *pool, void (*work)(void *arg, int chunk), void *arg, int num_chunks);

// End the workers, wait for them, free the pool. No pool_run may be in progress.
void pool_destroy(Pool *pool);

#endif
