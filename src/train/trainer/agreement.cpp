#include "train/trainer/agreement.hpp"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "comm/collective_errors.hpp"
#include "config/core/field.hpp"
#include "config/core/hash.hpp"

namespace capstan::train {

namespace {

// The first object that the loader knows is the program itself; its note of type NT_GNU_BUILD_ID as
// hexadecimal digits.
int find_build_id(dl_phdr_info* object, size_t, void* result) {
  auto& text = *static_cast<std::string*>(result);
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the loader gives addresses as integers
    const auto* at = reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
    const char* const end = at + segment.p_memsz;
    while (end - at >= static_cast<std::ptrdiff_t>(sizeof(ElfW(Nhdr)))) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* name = at + sizeof note;
      const char* value = name + ((note.n_namesz + 3) & ~3U);
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
        constexpr const char* kDigits = "0123456789abcdef";
        for (size_t b = 0; b < note.n_descsz; ++b) {
          const auto byte = static_cast<unsigned char>(value[b]);
          text += {kDigits[byte >> 4], kDigits[byte & 15]};
        }
        return 1;
      }
      at = value + ((note.n_descsz + 3) & ~3U);
    }
  }
  return 1;
}

}  // namespace

std::string program_identity() {
  std::string build;
  ::dl_iterate_phdr(find_build_id, &build);
  return "capstan " CAPSTAN_VERSION ", build " + (build.empty() ? "unknown" : build);
}

namespace {

[[noreturn]] void fail_differing(const std::vector<std::string>& differing) {
  constexpr size_t kShownDifferences = 8;
  Error error(ErrorCode::rank_failure, differing[0],
              "start all ranks with one program, one recipe and the same files");
  for (size_t i = 1; i < std::min(differing.size(), kShownDifferences); ++i) error.in(differing[i]);
  if (differing.size() > kShownDifferences)
    error.in("and " + std::to_string(differing.size() - kShownDifferences) + " more");
  throw error;
}

std::string disagreement(size_t rank, const std::vector<std::string>& hosts, const std::string& what,
                         const std::string& value, const std::string& of_rank_0) {
  return "rank " + std::to_string(rank) + " on host `" + hosts[rank] + "` disagrees with rank 0 on host `" +
         hosts[0] + "` about " + what + ": `" + value + "` against `" + of_rank_0 + "`";
}

// The first line in which two canonical forms differ, as "path = value"; empty where one has no such line.
// Explicit fields come before derived ones: a derived field is named only where nothing else differs.
std::pair<std::string, std::string> first_difference(const std::string& mine, const std::string& other) {
  std::istringstream a(mine), b(other);
  std::pair<std::string, std::string> first;
  for (std::string line, other_line;;) {
    const bool more = static_cast<bool>(std::getline(a, line)),
               other_more = static_cast<bool>(std::getline(b, other_line));
    if (!more) line.clear();
    if (!other_more) other_line.clear();
    if (!more && !other_more) return first;
    if (line == other_line) continue;
    const std::string path = line.substr(0, line.find(" = "));
    const bool same_field = path == other_line.substr(0, other_line.find(" = "));
    if (!same_field || !config::schema().find_derivation(path)) return {line, other_line};
    if (first.first.empty()) first = {line, other_line};
  }
}

}  // namespace

void require_agreement(comm::World& world, const std::vector<AgreedValue>& values) {
  if (world.size() == 1) return;
  const auto hosts = comm::gather_texts(world.communicator(), world.host());
  std::vector<std::string> differing;
  for (const AgreedValue& agreed : values) {
    const auto all = comm::gather_texts(world.communicator(), agreed.value);
    for (size_t rank = 1; rank < all.size(); ++rank)
      if (all[rank] != all[0]) differing.push_back(disagreement(rank, hosts, agreed.name, all[rank], all[0]));
  }
  if (!differing.empty()) fail_differing(differing);
}

void require_same_recipe(comm::World& world, const config::Config& config) {
  if (world.size() == 1) return;
  comm::Communicator& group = world.communicator();
  const auto hashes =
      comm::gather_texts(group, config::config_hash(config::schema(), &config, config::HashScope::full));
  if (std::all_of(hashes.begin(), hashes.end(), [&](const auto& hash) { return hash == hashes[0]; })) return;
  const std::string form = config::canonical_form(config::schema(), &config);
  const std::string is_rank0 = comm::gather_texts(group, world.rank() == 0 ? form : "")[0];
  const auto [mine, of_rank_0] = first_difference(form, is_rank0);
  const auto lines = comm::gather_texts(group, mine), rank0_lines = comm::gather_texts(group, of_rank_0);
  const auto hosts = comm::gather_texts(group, world.host());
  std::vector<std::string> differing;
  for (size_t rank = 1; rank < hashes.size(); ++rank)
    if (hashes[rank] != hashes[0])
      differing.push_back(disagreement(rank, hosts, "the recipe", lines[rank], rank0_lines[rank]));
  fail_differing(differing);
}

}  // namespace capstan::train
