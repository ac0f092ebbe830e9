#include "engine/data/usage.h"

#include "engine/operation/issue_context.h"
#include "schedule/step.h"

namespace pycomm {

std::string heldText(const Usage& usage) {
  std::string text;
  const auto check = [&](const char* name, uint64_t is, uint64_t most = 0) {
    if (is > most) {
      text += std::string(text.empty() ? "" : ", ") + name + ": " + std::to_string(is) +
          (most == 0 ? "" : " (at most " + std::to_string(most) + ")");
    }
  };
  check("transfers", usage.transfers);
  check("unexpected frames", usage.unexpected_frames);
  check("queued sends", usage.queued_sends);
  check("receives", usage.receives);
  check("questions for messages", usage.asks);
  check("tags", usage.tags);
  check("frames that have not left", usage.frames);
  check("bytes of staging", usage.staging_nbytes);
  check("held operations", usage.held);
  check("watched operations in shared memory", usage.on_host);
  check("followed operations", usage.followed);
  check("refused operations", usage.refused);
  check("operations in shared memory", usage.host_pending);
  const Tables::Usage& tables = usage.tables;
  check("operations that are entered", tables.operations);
  check("unexpected operations", tables.unexpected);
  if (tables.unexpected > 0) {
    const Tables::Usage::Unexpected& first = tables.first_unexpected;
    const bool derived = (first.id & kDerivedIdBit) != 0;
    text += " (the first is " + std::string(derived ? "derived" : "counted") + " operation " +
        std::to_string(first.id & ~kDerivedIdBit) + ", " + collectiveName(first.kind) + ", of rank " +
        std::to_string(first.peer) + ", " + std::to_string(first.frames) + " frames" +
        (first.answered ? ", answered" : "") + ")";
  }
  check("places of unexpected operations", tables.places_taken);
  check("unanswered questions for messages", tables.asked);
  check("credit of unexpected operations", tables.credited_unexpected);
  check("bytes in pools", static_cast<uint64_t>(tables.eager_in));
  check("operations ahead", tables.granted_early);
  check("history", tables.history, Tables::kRecent);
  check("forgotten operations", tables.forgotten, Tables::kForgotten);
  check("past operations of peers", tables.past, tables.most_past);
  return text;
}

} // namespace pycomm
