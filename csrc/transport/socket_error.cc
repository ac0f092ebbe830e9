#include "transport/socket_error.h"

#include <sys/resource.h>

#include <cerrno>

namespace pycomm {

ErrorRecord systemError(ErrorCode code, const std::string& summary, int error_number) {
  ErrorRecord record;
  record.code = code;
  record.summary = summary;
  record.cause = errnoText(error_number);
  if (error_number == EMFILE || error_number == ENFILE) {
    record.code = ErrorCode::TooManyFiles;
    rlimit limit{};
    if (error_number == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
      record.summary += ": this process may open no more than " + std::to_string(limit.rlim_cur) + " files";
      record.hint = "raise the limit, ulimit -n " + std::to_string(limit.rlim_cur * 4);
    } else {
      record.summary += ": this host has no more open files left";
      record.hint = "raise fs.file-max, or find out who holds so many files open";
    }
  } else if (error_number == ENOMEM || error_number == ENOBUFS) {
    record.code = ErrorCode::OutOfMemory;
  }
  return record;
}

} // namespace pycomm
