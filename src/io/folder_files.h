/* SPDX-License-Identifier: Apache-2.0 */
/*
** folder_files.h: what folder.c does with the entries of open folders. Names are told apart by patterns: a folder's own
** files belong together and are replaced together, all others are somebody else's. Functions return 0 or an errno.
*/
#ifndef BS_IO_FOLDER_FILES_H
#define BS_IO_FOLDER_FILES_H

#include "io/file.h"

/* Patterns of fnmatch(3). The first is the name of the file without which there is no folder of this kind. */
typedef struct bsi_own {
    int n;
    char **pattern;
} bsi_own;

bool bsi_own_has(const bsi_own *own, const char *name);

/* Called for every entry but "." and ".."; an answer that is not 0 ends the walk and is its result. Entries may be
   removed and added meanwhile: the names are read before the first call. */
typedef int (*bsi_entry_fn)(void *ud, int dir, const char *name);
int bsi_folder_each(int dir, bsi_entry_fn fn, void *ud);

/* Links everything of `from` that is not its own into `to`; folders are made again, with mode and owner. */
int bsi_folder_link(int from, int to, const bsi_own *own);
/* Removes what bsi_folder_link has put there. */
int bsi_folder_unlink(int dir, const bsi_own *own);
/* Gives files of `to` the mode and, where that is allowed, the owner of the file of the same name in `from`. */
int bsi_folder_modes(int from, int to);
/* Empties the folder `old`, whose place `next` has taken: own files and those that are linked in `next`
   are removed, others move there. over: also where `next` has another file of the name; else it stays in `old`. */
int bsi_folder_retire(int old, int next, const bsi_own *own, bool over);
/* Moves own files; the first pattern's is the first to go or the last. */
int bsi_folder_move(int from, int to, const bsi_own *own, bool lead_last);
/* Removes the entry, whatever it is. */
int bsi_remove_tree(int dir, const char *name);

/* The process in the name of something temporary, which is stem and a process id; 0: it is no such name. */
long bsi_temp_pid(const char *name, const char *stem);
/* Is there no such process, or is it this one? */
bool bsi_pid_gone(long pid);
/* A temporary file of an own one, made by a process that is gone. */
bool bsi_own_left_over(const bsi_own *own, const char *name);

/* Temporary folders: beside their place, named as it is and BSI_BESIDE; inside it, while they are made, and once all of
   the old files are in them. */
#define BSI_BESIDE ".tmp."
#define BSI_INSIDE ".bslua.tmp."
#define BSI_PUT    ".bslua.put."

#endif
