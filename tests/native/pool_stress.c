// Many runs of a pool: every chunk of every run is worked on exactly once, and all of them before pool_run returns.
// Arguments: number of threads, number of runs, microseconds between runs. Prints nothing; fails with a message.
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool.h"

enum { MAX_CHUNKS = 97 };

typedef struct {
    int run;
    int counts[MAX_CHUNKS];  // plain integers: a thread sanitizer sees two threads at one chunk
    int seen_run[MAX_CHUNKS];
} Job;

static void work(void *arg, int chunk) {
    Job *job = arg;
    for (volatile int i = 0; i < chunk * 7 % 300; i++) {
    }
    job->counts[chunk]++;
    job->seen_run[chunk] = job->run;
}

static void pause_between_runs(long microseconds) {
    struct timespec time = {0, microseconds * 1000};
    if (microseconds) nanosleep(&time, NULL);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int num_threads = atoi(argv[1]), num_runs = atoi(argv[2]);
    long microseconds = atol(argv[3]);
    Pool *pool = pool_create(num_threads), *other = pool_create(2);
    if (!pool || !other || pool_num_threads(pool) != num_threads) return fprintf(stderr, "no pool\n"), 1;
    static Job jobs[2];  // in turn: a worker with the job of the run before spoils a count
    for (int run = 0; run < num_runs; run++) {
        Job *job = &jobs[run % 2];
        *job = (Job){.run = run};
        int num_chunks = run % 3 ? run % 4 : run % (MAX_CHUNKS + 1);
        pool_run(run % 5 ? pool : other, work, job, num_chunks);
        for (int chunk = 0; chunk < MAX_CHUNKS; chunk++) {
            int expected = chunk < num_chunks;
            if (job->counts[chunk] != expected || job->seen_run[chunk] != expected * run) {
                fprintf(stderr, "run %d, chunk %d: %d calls\n", run, chunk, job->counts[chunk]);
                return 1;
            }
        }
        pause_between_runs(microseconds);
    }
    pool_destroy(other);
    pool_destroy(pool);
    for (int i = 0; i < 12; i++) {  // workers end wherever they are: starting, spinning, asleep
        Pool *short_lived = pool_create(num_threads);
        Job job = {.run = i};
        if (i % 2) pool_run(short_lived, work, &job, MAX_CHUNKS);
        pause_between_runs(i % 3 ? 0 : 200);
        pool_destroy(short_lived);
    }
    return 0;
}
