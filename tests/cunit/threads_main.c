/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread pool alone, without an interpreter: `threads_main quota ROOT MEMBERSHIP` prints
 * arl_threads_quota; `threads_main time` prints what waking everybody for nothing costs;
 * `threads_main run` checks that every row is done exactly once, from several
 * callers at once and in children forked meanwhile, and that exit joins the threads.
 */
#include "core/arl_threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 1000, CALLERS = 4, CALLS = 50, FORKS = 10 };

typedef struct job {
    atomic_int done[ROWS];
} job_t;

static void
count_rows(void *context, int64_t begin, int64_t end)
{
    job_t *job = context;

    for (int64_t row = begin; row < end; row++) {
        atomic_fetch_add(&job->done[row], 1);
    }
}

static int
run_once(int64_t count, int64_t nbytes)
{
    job_t *job = calloc(1, sizeof(*job));
    int wrong = job == NULL;

    for (int row = 0; job != NULL && row < ROWS; row++) {
        atomic_init(&job->done[row], 0);
    }
    if (job != NULL) {
        arl_parallel_for(count, nbytes, count_rows, job);
    }
    for (int row = 0; job != NULL && row < ROWS; row++) {
        wrong += atomic_load(&job->done[row]) != (row < count);
    }
    free(job);
    return wrong;
}

static void *
caller(void *argument)
{
    int *wrong = argument;

    for (int call = 0; call < CALLS; call++) {
        *wrong += run_once(ROWS, (int64_t)1 << 30);
        *wrong += run_once(3, (int64_t)1 << 30);
        *wrong += run_once(1, (int64_t)1 << 30);
        *wrong += run_once(0, (int64_t)1 << 30);
        *wrong += run_once(ROWS, 1);
    }
    return NULL;
}

/* Each child is born while the parent's pool is busy, and must be able to do all of it itself. */
static int
fork_children(void)
{
    int wrong = 0;

    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        int status = 0;

        if (child == 0) {
            (void)alarm(20);
            exit(run_once(ROWS, (int64_t)1 << 30) != 0); /* with the exit hooks */
        }
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
            (void)printf("child %d: status %d\n", i, status);
            wrong++;
        }
    }
    return wrong;
}

static void
do_nothing(void *context, int64_t begin, int64_t end)
{
    (void)context;
    (void)begin;
    (void)end;
}

static double
now(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Microseconds a job, with pauses long enough for the workers to fall asleep, and without. */
static void
time_empty_jobs(void)
{
    double slept = 0, start;

    for (int i = 0; i < 200; i++) {
        (void)usleep(1000);
        start = now();
        arl_parallel_for(1 << 20, (int64_t)1 << 30, do_nothing, NULL);
        slept += now() - start;
    }
    start = now();
    for (int i = 0; i < 2000; i++) {
        arl_parallel_for(1 << 20, (int64_t)1 << 30, do_nothing, NULL);
    }
    (void)printf("threads %d: %.1f us after a pause, %.1f us at once\n", arl_threads_count(),
                 slept / 200 * 1e6, (now() - start) / 2000 * 1e6);
}

int
main(int argc, char **argv)
{
    pthread_t threads[CALLERS];
    int wrong[CALLERS + 1] = {0}, sum = 0;

    if (argc == 4 && strcmp(argv[1], "quota") == 0) {
        (void)printf("%d\n", arl_threads_quota(argv[2], argv[3]));
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "time") == 0) {
        time_empty_jobs();
        return 0;
    }
    for (int i = 0; i < CALLERS; i++) {
        if (pthread_create(&threads[i], NULL, caller, &wrong[i]) != 0) {
            return 2;
        }
    }
    wrong[CALLERS] = argc > 2 ? 0 : fork_children(); /* "run nofork": for thread sanitizers */
    for (int i = 0; i < CALLERS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    for (int i = 0; i <= CALLERS; i++) {
        sum += wrong[i];
    }
    (void)printf("threads %d wrong %d\n", arl_threads_count(), sum);
    return sum != 0;
}
