/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_TRANSPORT_LOADER_H
#define ARL_TRANSPORT_LOADER_H

#include "core/arl_status.h"

#include <stdbool.h>

/*
 * Optional libraries, loaded on first use into a table of function pointers. A load is all or
 * nothing: a table is published only when every required symbol is there and the version is
 * recent enough. Nothing is remembered about a failed load, so that the next call tries again
 * (the user may have imported torch, or set a variable, in between).
 *
 * Order, and the first library that opens is the one that counts:
 *   1. the environment variable of the library, a path. It is an order, not a hint: when that
 *      file does not do, the load fails and nothing else is tried.
 *   2. a library that is in the process already (torch's own, wherever it came from). A second
 *      copy beside it would have state of its own.
 *   3. the `nvidia` wheels below each search root (site-packages)
 *   4. the system's: whatever ld.so finds, then a few well-known folders
 */

typedef struct arl_symbol {
    const char *name;
    size_t offset;   /* of the function pointer in the table */
    int min_version; /* of the library that first had it, in that library's own code; 0: any */
    bool required;   /* an optional one stays NULL when missing */
} arl_symbol_t;

typedef struct arl_library {
    const char *title;                 /* "NCCL" */
    const char *stem;                  /* "libnccl": how its file names begin */
    const char *const *sonames;        /* best first, ends with NULL */
    const char *const *wheel_folders;  /* below a search root, ends with NULL */
    const char *const *system_folders; /* beside ld.so's own, ends with NULL */
    const char *override_env;
    const char *install_hint; /* what to do when there is none */
    int min_version;
    const arl_symbol_t *symbols;
    size_t symbol_count;
    /* The library's version; called with the symbols filled in. False when the call failed,
     * with the reason in `reason`. */
    bool (*version)(const void *table, int *version_p, char *reason, size_t size);
    /* 13000 -> "13.0" */
    void (*version_text)(int version, char *text, size_t size);
} arl_library_t;

enum { ARL_LIBRARY_PATH_MAX = 1024, ARL_LIBRARY_VERSION_MAX = 24 };

/* What a load found, for show_config and for messages. */
typedef struct arl_library_found {
    char path[ARL_LIBRARY_PATH_MAX]; /* of the file, as the dynamic linker knows it */
    const char *how;                 /* "environment variable", "already in the process", … */
    int version;
    char version_text[ARL_LIBRARY_VERSION_MAX];
} arl_library_found_t;

/*
 * Fills `table` and `found_p`. ARL_ERR_UNAVAILABLE names every path that was tried with the
 * dynamic linker's reason, what was found and what is needed, and all missing symbols at once;
 * the table is then unspecified. The library stays in the process for good: handles, contexts
 * and communicators made with it may outlive anything that we could count.
 */
arl_status_t arl_library_load(const arl_library_t *library, void *table,
                              arl_library_found_t *found_p, arl_error_t *err);

/*
 * Adds a folder in which `nvidia/<package>/lib` is looked for. The path is copied; one that is
 * known already, and more than a few, are ignored. Not to be called while a load runs: the
 * module does it once, at import.
 */
void arl_library_add_root(const char *folder);

/* The number of search roots, and one of them. */
size_t arl_library_root_count(void);
const char *arl_library_root(size_t index);

#endif
