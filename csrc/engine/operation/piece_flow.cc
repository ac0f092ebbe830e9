#include "engine/operation/piece_flow.h"

#include <algorithm>
#include <numeric>

#include "base/codec.h"
#include "base/dtype.h"

namespace pycomm {
namespace {

// A copy of 1 MiB over a bus of 25 GB/s takes 40 us, so what starting it and waiting for its event costs (some us) is little beside it.
constexpr size_t kSmallestPiece = 1 << 20;
constexpr size_t kMostPieces =
    64; // of one tensor: by then its first and last copy, which overlap with nothing, are short
constexpr size_t kSmallestSlice = 256 << 10; // where a piece is of one part of many
constexpr size_t kPage = 4096;

size_t pieceNbytes(size_t nbytes) {
  const size_t share = (nbytes + kMostPieces - 1) / kMostPieces;
  return std::max(kSmallestPiece, (share + kPage - 1) / kPage * kPage);
}

std::vector<PieceFlow::Piece> cut(size_t nbytes, size_t piece_nbytes) {
  std::vector<PieceFlow::Piece> pieces;
  for (size_t offset = 0; offset < nbytes; offset += piece_nbytes) {
    pieces.push_back({offset, std::min(piece_nbytes, nbytes - offset)});
  }
  return pieces;
}

} // namespace

PieceFlow::Span PieceFlow::spanOf(
    const PreparedSchedule& prepared,
    const Region& region,
    const Operand& operand,
    size_t piece_nbytes) {
  if (region.numel == 0) {
    return {};
  }
  size_t offset = static_cast<size_t>(region.offset) * elementSize(prepared.dtypeOf(region.buffer));
  size_t nbytes = prepared.nbytesOf(region);
  if (operand.encoded_part != kPlain) {
    offset = prepared.encodedOffset(region.offset, operand.encoded_part);
    nbytes = static_cast<size_t>(encodedNbytes(prepared.schedule.codec, region.numel));
  }
  return {
      static_cast<uint32_t>(offset / piece_nbytes), static_cast<uint32_t>((offset + nbytes - 1) / piece_nbytes + 1)};
}

std::shared_ptr<PieceFlow> PieceFlow::ofSchedule(
    const PreparedSchedule& prepared,
    const Operand& input,
    const Operand& output,
    bool same_memory) {
  const size_t in_nbytes = pieceNbytes(input.nbytes);
  const size_t out_nbytes = pieceNbytes(output.nbytes);
  const std::vector<Piece> inputs = cut(input.nbytes, in_nbytes);
  auto flow = std::make_shared<PieceFlow>();
  flow->leaving_ = cut(output.nbytes, out_nbytes);
  if (inputs.size() < 2 && flow->leaving_.size() < 2) {
    return nullptr;
  }
  flow->writers_left_.assign(flow->leaving_.size(), 0);
  std::vector<uint32_t> place(inputs.size(), 0); // 1 + where in arriving_; 0: not wanted yet
  const auto want = [&](size_t piece) {
    if (place[piece] == 0) {
      flow->arriving_.push_back(inputs[piece]);
      place[piece] = static_cast<uint32_t>(flow->arriving_.size());
    }
    return place[piece];
  };
  const Schedule& schedule = prepared.schedule;
  for (const Step& step : schedule.steps) {
    uint32_t needed = 0;
    const auto look = [&](const Region& region) {
      if (region.buffer == Buffer::Input || (region.buffer == Buffer::Output && same_memory)) {
        const Span span = spanOf(prepared, region, region.buffer == Buffer::Input ? input : output, in_nbytes);
        for (uint32_t piece = span.first; piece < span.last; ++piece) {
          needed = std::max(needed, want(piece));
        }
      }
    };
    look(step.src);
    look(step.dst);
    for (uint32_t i = step.sources_begin; i < step.sources_end; ++i) {
      look(schedule.sources[i]);
    }
    flow->needed_by_step_.push_back(needed);
    Span written;
    if (step.dst.buffer == Buffer::Output) {
      written = spanOf(prepared, step.dst, output, out_nbytes);
    }
    for (uint32_t piece = written.first; piece < written.last; ++piece) {
      ++flow->writers_left_[piece];
    }
    flow->written_by_step_.push_back(written);
  }
  for (size_t piece = 0; piece < inputs.size(); ++piece) {
    want(piece);
  }
  flow->step_order_.resize(schedule.steps.size());
  std::iota(flow->step_order_.begin(), flow->step_order_.end(), 0U);
  std::stable_sort(
      flow->step_order_.begin(), flow->step_order_.end(), [&needed = flow->needed_by_step_](uint32_t a, uint32_t b) {
        return needed[a] < needed[b];
      });
  return flow;
}

void PieceFlow::stepEnded(uint32_t step) {
  const Span written = written_by_step_[step];
  for (uint32_t piece = written.first; piece < written.last; ++piece) {
    if (--writers_left_[piece] == 0) {
      leave(piece);
    }
  }
}

std::shared_ptr<PieceFlow> PieceFlow::ofRounds(const Rounds& rounds) {
  auto flow = std::make_shared<PieceFlow>();
  flow->rounds_ = rounds;
  flow->round_count_ = (rounds.part_nbytes + rounds.round_nbytes - 1) / rounds.round_nbytes;
  const size_t share = pieceNbytes(rounds.part_nbytes);
  const size_t slice =
      std::max(rounds.input_parts, rounds.output_parts) > 1 ? std::max(kSmallestSlice, share / 4) : share;
  flow->rounds_a_piece_ = std::max<uint64_t>(1, slice / rounds.round_nbytes);
  if (flow->round_count_ <= flow->rounds_a_piece_) {
    return nullptr;
  }
  flow->cutRounds(flow->arriving_, rounds.input_parts);
  flow->cutRounds(flow->leaving_, rounds.output_parts);
  return flow;
}

void PieceFlow::cutRounds(std::vector<Piece>& pieces, size_t parts) const {
  const size_t step = rounds_a_piece_ * rounds_.round_nbytes;
  for (size_t offset = 0; offset < rounds_.part_nbytes; offset += step) {
    for (size_t part = 0; part < parts; ++part) {
      pieces.push_back({part * rounds_.part_nbytes + offset, std::min(step, rounds_.part_nbytes - offset)});
    }
  }
}

size_t PieceFlow::neededInRound(uint64_t round) const noexcept {
  return (round / rounds_a_piece_ + 1) * rounds_.input_parts;
}

void PieceFlow::roundEnded(uint64_t round) {
  if (round + 1 != round_count_ && (round + 1) % rounds_a_piece_ != 0) {
    return;
  }
  const size_t first = round / rounds_a_piece_ * rounds_.output_parts;
  for (size_t part = 0; part < rounds_.output_parts; ++part) {
    leave(first + part);
  }
}

} // namespace pycomm
