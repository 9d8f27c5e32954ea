/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_loader.h"

#include <ctype.h>
#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOTS_MAX = 16, REPORT_MAX = 3200, LOADED_MAX = 4 };

/* ---- search roots --------------------------------------------------------------------------- */

static char *search_roots[ROOTS_MAX];
static size_t search_root_count;

void
arl_library_add_root(const char *folder)
{
    char *copy;

    for (size_t i = 0; i < search_root_count; i++) {
        if (strcmp(search_roots[i], folder) == 0) {
            return;
        }
    }
    if (search_root_count == ROOTS_MAX || folder[0] == '\0') {
        return;
    }
    copy = strdup(folder);
    if (copy != NULL) { /* a root less is a library that may not be found, and is reported then */
        search_roots[search_root_count++] = copy;
    }
}

size_t
arl_library_root_count(void)
{
    return search_root_count;
}

const char *
arl_library_root(size_t index)
{
    return search_roots[index];
}

/* ---- the report of what was tried ------------------------------------------------------------ */

typedef struct report {
    char text[REPORT_MAX];
    size_t used;
} report_t;

static void report_add(report_t *report, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void
report_add(report_t *report, const char *format, ...)
{
    const size_t room = sizeof(report->text) - report->used;
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(report->text + report->used, room, format, args);
    va_end(args);
    if (length > 0) {
        report->used += (size_t)length < room ? (size_t)length : room - 1;
    }
}

static void
report_open_failure(report_t *report, const char *path, const char *reason)
{
    const size_t length = strlen(path);

    if (reason == NULL) {
        reason = "the dynamic linker gives no reason";
    }
    if (strncmp(reason, path, length) == 0) { /* most reasons begin with the path */
        report_add(report, "\n  %s", reason);
    }
    else {
        report_add(report, "\n  %s: %s", path, reason);
    }
}

/* ---- finding -------------------------------------------------------------------------------- */

typedef struct search {
    const arl_library_t *library;
    report_t report;
    void *handle;
    const char *how;
} search_t;

static void
search_open(search_t *search, const char *path, const char *how)
{
    if (search->handle != NULL) {
        return;
    }
    (void)dlerror();
    search->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (search->handle == NULL) {
        report_open_failure(&search->report, path, dlerror());
        return;
    }
    search->how = how;
}

/* Files of the process whose names begin with the library's stem, also where a wheel's build
 * put a hash into the name (libcudart-80664282.so.10). Plug-ins (libnccl-net.so) are others. */
typedef struct loaded_files {
    const char *stem;
    char *paths[LOADED_MAX];
    size_t count;
} loaded_files_t;

static bool
loaded_name_matches(const char *path, const char *stem)
{
    const char *name = strrchr(path, '/');
    const size_t length = strlen(stem);

    name = name == NULL ? path : name + 1;
    if (strncmp(name, stem, length) != 0) {
        return false;
    }
    name += length;
    if (*name == '-') {
        for (name++; isxdigit((unsigned char)*name); name++) {
        }
    }
    return strncmp(name, ".so", 3) == 0;
}

static int
loaded_collect(struct dl_phdr_info *info, size_t size, void *context)
{
    loaded_files_t *files = context;

    (void)size;
    if (files->count < LOADED_MAX && info->dlpi_name != NULL &&
        loaded_name_matches(info->dlpi_name, files->stem)) {
        files->paths[files->count] = strdup(info->dlpi_name);
        files->count += files->paths[files->count] != NULL;
    }
    return 0;
}

static void
search_process(search_t *search)
{
    loaded_files_t files = {.stem = search->library->stem};

    for (const char *const *name = search->library->sonames; *name != NULL; name++) {
        if (search->handle == NULL) {
            search->handle = dlopen(*name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        }
    }
    /* Not opened inside the walk: it holds the linker's lock. */
    (void)dl_iterate_phdr(loaded_collect, &files);
    for (size_t i = 0; i < files.count; i++) {
        if (search->handle == NULL) {
            search->handle = dlopen(files.paths[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        }
        free(files.paths[i]);
    }
    if (search->handle == NULL) {
        report_add(&search->report, "\n  in the process: no %s.so*", search->library->stem);
        return;
    }
    search->how = "already in the process";
}

static void
search_folders(search_t *search, const char *root, const char *const *folders, const char *how)
{
    char path[ARL_LIBRARY_PATH_MAX];

    for (; *folders != NULL; folders++) {
        for (const char *const *name = search->library->sonames; *name != NULL; name++) {
            int length = snprintf(path, sizeof(path), "%s%s%s/%s", root, root[0] != '\0' ? "/" : "",
                                  *folders, *name);

            if (length > 0 && (size_t)length < sizeof(path)) {
                search_open(search, path, how);
            }
        }
    }
}

static void
search_all(search_t *search)
{
    const arl_library_t *library = search->library;
    const char *path = getenv(library->override_env);

    if (path != NULL && path[0] != '\0') {
        search_open(search, path, "environment variable");
        return;
    }
    search_process(search);
    for (size_t i = 0; i < search_root_count; i++) {
        search_folders(search, search_roots[i], library->wheel_folders, "nvidia wheel");
    }
    for (const char *const *name = library->sonames; *name != NULL; name++) {
        search_open(search, *name, "system");
    }
    search_folders(search, "", library->system_folders, "system folder");
}

/* ---- filling -------------------------------------------------------------------------------- */

static void
found_path(void *handle, char *path, size_t size)
{
    struct link_map *map = NULL;

    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != NULL) {
        (void)snprintf(path, size, "%s", map->l_name);
    }
    else {
        (void)snprintf(path, size, "?");
    }
}

/* Copies the addresses; the bytes of a function pointer are moved as bytes, since ISO C has no
 * conversion between object and function pointers. Returns how many required ones are missing. */
static size_t
table_fill(const arl_library_t *library, void *handle, void *table)
{
    size_t missing = 0;

    for (size_t i = 0; i < library->symbol_count; i++) {
        void *address = dlsym(handle, library->symbols[i].name);

        memcpy((char *)table + library->symbols[i].offset, &address, sizeof(address));
        missing += address == NULL && library->symbols[i].required;
    }
    return missing;
}

static void
report_missing(const arl_library_t *library, const void *table, report_t *report)
{
    const char *separator = " ";

    for (size_t i = 0; i < library->symbol_count; i++) {
        const arl_symbol_t *symbol = &library->symbols[i];
        void *address;

        memcpy(&address, (const char *)table + symbol->offset, sizeof(address));
        if (address == NULL && symbol->required) {
            char since[ARL_LIBRARY_VERSION_MAX];

            report_add(report, "%s%s", separator, symbol->name);
            if (symbol->min_version > 0) {
                library->version_text(symbol->min_version, since, sizeof(since));
                report_add(report, " (since %s)", since);
            }
            separator = ", ";
        }
    }
}

static arl_status_t
load_fail(const arl_library_t *library, const report_t *report, arl_error_t *err)
{
    char needed[ARL_LIBRARY_VERSION_MAX];

    library->version_text(library->min_version, needed, sizeof(needed));
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, "load library",
                         "%s is not usable here; version %s or later is needed.%s\n%s",
                         library->title, needed, report->text, library->install_hint);
}

static arl_status_t
load_check(const search_t *search, void *table, arl_library_found_t *found, arl_error_t *err)
{
    const arl_library_t *library = search->library;
    char reason[256] = "", version_text[ARL_LIBRARY_VERSION_MAX] = "unknown";
    const size_t missing = table_fill(library, search->handle, table);
    report_t report = {.used = 0};
    bool answered = false;

    found_path(search->handle, found->path, sizeof(found->path));
    found->how = search->how;
    found->version = 0;
    /* Without all symbols the version is asked for only if it can be: version() copes. */
    answered = library->version(table, &found->version, reason, sizeof(reason));
    if (answered) {
        library->version_text(found->version, version_text, sizeof(version_text));
    }
    (void)snprintf(found->version_text, sizeof(found->version_text), "%s", version_text);
    if (missing == 0 && answered && found->version >= library->min_version) {
        return ARL_OK;
    }
    report_add(&report, "\n  %s (%s): version %s", found->path, found->how, version_text);
    if (!answered && reason[0] != '\0') {
        report_add(&report, ": %s", reason);
    }
    if (missing > 0) {
        report_add(&report, "; %zu missing:", missing);
        report_missing(library, table, &report);
    }
    return load_fail(library, &report, err);
}

arl_status_t
arl_library_load(const arl_library_t *library, void *table, arl_library_found_t *found_p,
                 arl_error_t *err)
{
    search_t search = {.library = library};
    arl_library_found_t found = {.how = ""};
    arl_status_t status;

    search_all(&search);
    if (search.handle == NULL) {
        if (getenv(library->override_env) != NULL && getenv(library->override_env)[0] != '\0') {
            report_add(&search.report, "\n%s names that file, so nothing else was tried.",
                       library->override_env);
        }
        return load_fail(library, &search.report, err);
    }
    status = load_check(&search, table, &found, err);
    if (status != ARL_OK) {
        (void)dlclose(search.handle);
        return status;
    }
    *found_p = found;
    return ARL_OK;
}
