#include "config/core/diagnostics.hpp"

#include <algorithm>
#include <tuple>

#include "base/json.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "base/wording.hpp"

namespace capstan::config {

std::string_view Source::line(int number) const {
  size_t begin = 0;
  for (int current = 1; current < number; ++current) {
    begin = text.find('\n', begin);
    if (begin == std::string::npos) return {};
    ++begin;
  }
  if (number < 1) return {};
  return std::string_view(text).substr(begin, text.find('\n', begin) - begin);
}

std::string shortened(std::string_view text) {
  std::string out(text.substr(0, 80));
  std::replace(out.begin(), out.end(), '\n', ' ');
  return out + (text.size() > 80 ? "..." : "");
}

std::string_view level_name(Level level) {
  switch (level) {
    case Level::error:
      return "error";
    case Level::warning:
      return "warning";
    case Level::note:
      return "note";
  }
  return "error";
}

std::string location_text(const SourceLocation& location, const std::vector<Source>& sources, bool column) {
  if (!location.known()) return {};
  const Source& source = sources[static_cast<size_t>(location.source)];
  std::string text = source.name + ":" + std::to_string(location.line);
  if (column || source.kind != Source::Kind::cli) text += ":" + std::to_string(location.column);
  return text;
}

namespace {

struct Palette {
  const char *level = "", *bold = "", *frame = "", *off = "";
};
Palette palette(Level level, bool color) {
  if (!color) return {};
  const char* paint = level == Level::error     ? "\033[1;31m"
                      : level == Level::warning ? "\033[1;33m"
                                                : "\033[1;36m";
  return {paint, "\033[1m", "\033[1;34m", "\033[0m"};
}

// Returns the diagnostic with the control characters of names and values escaped.
Diagnostic for_terminal(Diagnostic diagnostic) {
  const auto escape = [](std::string& text) { text = escape_controls(text); };
  escape(diagnostic.message);
  escape(diagnostic.label);
  for (std::string& note : diagnostic.notes) escape(note);
  for (std::string& help : diagnostic.helps) escape(help);
  for (Diagnostic::Label& label : diagnostic.also) escape(label.text);
  return diagnostic;
}

// Returns the line with terminal control characters replaced; each character takes one column.
std::string printable(std::string_view line) {
  std::string result;
  for (size_t i = 0; i < line.size();) {
    const auto [value, bytes] = decode_utf8(line, i);
    if (value < 0x20 || value == 0x7f || (value >= 0x80 && value < 0xa0) ||
        (value >= 0x200b && value <= 0x200f) || (value >= 0x202a && value <= 0x202e) ||
        (value >= 0x2066 && value <= 0x2069))
      result += value == '\t' ? " " : "?";
    else
      append_utf8(result, value);
    i += static_cast<size_t>(bytes);
  }
  return result;
}

size_t byte_of_column(std::string_view line, int column) {
  size_t at = 0;
  for (int i = 1; i < column && at < line.size(); ++i) at += static_cast<size_t>(decode_utf8(line, at).bytes);
  return at;
}

// A window of at most `kWidth` characters around the stretch, with the stretch's column inside the window.
constexpr int kWidth = 110;
std::string window(std::string_view line, int& column, int& length) {
  const int total = static_cast<int>(count_code_points(line));
  length = std::clamp(length, 1, std::max(1, total - column + 1));
  length = std::min(length, kWidth - 20);
  if (total <= kWidth) return printable(line);
  const int first = std::clamp(column - 20, 1, std::max(1, total - kWidth + 1));
  const size_t begin = byte_of_column(line, first);
  const size_t end = byte_of_column(line, first + kWidth);
  std::string text = printable(line.substr(begin, end - begin));
  column -= first - 1;
  if (first > 1) {
    text = "…" + text;
    ++column;
  }
  if (end < line.size()) text += "…";
  return text;
}

void snippet(std::string& out, const SourceLocation& where, const std::string& label, char mark,
             size_t gutter, const std::vector<Source>& sources, const Palette& colors, const char* paint) {
  int column = where.column, length = where.length;
  const std::string line =
      window(sources[static_cast<size_t>(where.source)].line(where.line), column, length);
  const std::string number = std::to_string(where.line);
  const std::string blank(gutter, ' ');
  out += blank + colors.frame + " |" + colors.off + "\n";
  out += colors.frame + std::string(gutter - number.size(), ' ') + number + " |" + colors.off + " " + line +
         "\n";
  out += blank + colors.frame + " |" + colors.off + " " + std::string(static_cast<size_t>(column - 1), ' ') +
         paint + std::string(static_cast<size_t>(length), mark) + (label.empty() ? "" : " " + label) +
         colors.off + "\n";
}

std::string human(const Diagnostic& given, const std::vector<Source>& sources, bool color) {
  const Diagnostic diagnostic = for_terminal(given);
  const Palette colors = palette(diagnostic.level, color);
  std::string out = std::string(colors.level) + std::string(level_name(diagnostic.level));
  if (!diagnostic.code.empty()) out += "[" + diagnostic.code + "]";
  out += std::string(colors.off) + colors.bold + ": " + diagnostic.message + colors.off + "\n";
  size_t gutter = 1;
  if (diagnostic.location.known()) gutter = std::to_string(diagnostic.location.line).size();
  for (const auto& label : diagnostic.also)
    if (label.location.known()) gutter = std::max(gutter, std::to_string(label.location.line).size());
  const std::string blank(gutter, ' ');
  if (diagnostic.location.known()) {
    out += blank + colors.frame + "--> " + colors.off +
           escape_name(location_text(diagnostic.location, sources)) + "\n";
    snippet(out, diagnostic.location, diagnostic.label, '^', gutter, sources, colors, colors.level);
  }
  for (const auto& label : diagnostic.also) {
    if (!label.location.known()) {
      out += blank + colors.frame + " = " + colors.off + label.text + "\n";
      continue;
    }
    out += blank + colors.frame + "::: " + colors.off + escape_name(location_text(label.location, sources)) +
           "\n";
    snippet(out, label.location, label.text, '-', gutter, sources, colors, colors.frame);
  }
  if (diagnostic.location.known() && (!diagnostic.notes.empty() || !diagnostic.helps.empty()))
    out += blank + colors.frame + " |" + colors.off + "\n";
  const auto lines = [&](const char* kind, const std::vector<std::string>& texts) {
    for (const auto& text : texts) {
      std::string indented;
      for (const char c : text) {
        indented += c;
        if (c == '\n') indented += blank + "   " + std::string(std::string_view(kind).size(), ' ') + "  ";
      }
      out += blank + colors.frame + " = " + colors.off + colors.bold + kind + colors.off + ": " + indented +
             "\n";
    }
  };
  lines("note", diagnostic.notes);
  lines("help", diagnostic.helps);
  return out;
}

// Always one line.
std::string compact(const Diagnostic& given, const std::vector<Source>& sources) {
  const Diagnostic diagnostic = for_terminal(given);
  std::string out = escape_name(location_text(diagnostic.location, sources));
  if (!out.empty()) out += ": ";
  out += level_name(diagnostic.level);
  if (!diagnostic.code.empty()) out += "[" + diagnostic.code + "]";
  out += ": " + diagnostic.message;
  for (const auto& help : diagnostic.helps) out += " (" + help.substr(0, help.find('\n')) + ")";
  std::replace(out.begin(), out.end(), '\n', ' ');
  return out + "\n";
}

int utf16_column(std::string_view line, int column) {
  int units = 0;
  size_t at = 0;
  for (int i = 1; i < column && at < line.size(); ++i) {
    const auto [value, bytes] = decode_utf8(line, at);
    units += value >= 0x10000 ? 2 : 1;
    at += static_cast<size_t>(bytes);
  }
  return units;
}

// Adds file, line, column and LSP range of a location that is known.
void add_location(OrderedJson& object, const SourceLocation& location, const std::vector<Source>& sources) {
  if (!location.known()) return;
  const Source& source = sources[static_cast<size_t>(location.source)];
  const std::string_view line = source.line(location.line);
  const auto position = [&](int column) {
    return OrderedJson{{"line", location.line - 1}, {"character", utf16_column(line, column)}};
  };
  object["file"] = source.name;
  object["line"] = location.line;
  object["column"] = location.column;
  object["range"] = {{"start", position(location.column)},
                     {"end", position(location.column + location.length)}};
}

std::string json(const Diagnostic& diagnostic, const std::vector<Source>& sources) {
  OrderedJson object = {{"level", level_name(diagnostic.level)}, {"code", diagnostic.code}};
  if (!diagnostic.name.empty()) object["name"] = diagnostic.name;
  object["message"] = diagnostic.message;
  if (!diagnostic.path.empty()) object["path"] = diagnostic.path;
  add_location(object, diagnostic.location, sources);
  if (!diagnostic.label.empty()) object["label"] = diagnostic.label;
  object["notes"] = diagnostic.notes;
  object["help"] = diagnostic.helps;
  OrderedJson& related = object["related"] = OrderedJson::array();
  for (const auto& label : diagnostic.also) {
    related.push_back({{"message", label.text}});
    add_location(related.back(), label.location, sources);
  }
  OrderedJson& suggestions = object["suggestions"] = OrderedJson::array();
  for (const auto& suggestion : diagnostic.suggestions) {
    suggestions.push_back(
        {{"replacement", suggestion.replacement},
         {"applicability", suggestion.machine_applicable ? "machine-applicable" : "maybe-incorrect"}});
    add_location(suggestions.back(), suggestion.location, sources);
  }
  return dump_json(object);
}

}  // namespace

std::string render(const Diagnostic& diagnostic, const std::vector<Source>& sources,
                   const RenderOptions& options) {
  switch (options.format) {
    case DiagnosticFormat::human:
      return human(diagnostic, sources, options.color);
    case DiagnosticFormat::compact:
      return compact(diagnostic, sources);
    case DiagnosticFormat::json:
      return json(diagnostic, sources);
  }
  return {};
}

std::string render(const std::vector<Diagnostic>& diagnostics, const std::vector<Source>& sources,
                   const RenderOptions& options) {
  std::string out;
  if (options.format == DiagnosticFormat::json) {
    out = "[";
    for (size_t i = 0; i < diagnostics.size(); ++i) out += (i ? ",\n " : "") + json(diagnostics[i], sources);
    return out + "]\n";
  }
  for (const auto& diagnostic : diagnostics) {
    out += render(diagnostic, sources, options);
    const bool one_line = !diagnostic.location.known() && diagnostic.also.empty() &&
                          diagnostic.notes.empty() && diagnostic.helps.empty();
    if (options.format == DiagnosticFormat::human && !one_line) out += "\n";
  }
  const size_t errors = count(diagnostics, Level::error), warnings = count(diagnostics, Level::warning);
  if (options.format == DiagnosticFormat::human && errors + warnings > 0) {
    if (errors) out += counted(errors, "error") + (warnings ? ", " : "\n");
    if (warnings) out += counted(warnings, "warning") + "\n";
  }
  return out;
}

size_t count(const std::vector<Diagnostic>& diagnostics, Level level) {
  return static_cast<size_t>(
      std::count_if(diagnostics.begin(), diagnostics.end(),
                    [&](const Diagnostic& diagnostic) { return diagnostic.level == level; }));
}

void sort_diagnostics(std::vector<Diagnostic>& diagnostics) {
  std::stable_sort(diagnostics.begin(), diagnostics.end(), [](const Diagnostic& a, const Diagnostic& b) {
    const auto key = [](const Diagnostic& d) {
      return std::tuple(d.level, !d.location.known(), d.location.source, d.location.line, d.location.column);
    };
    return key(a) < key(b);
  });
}

}  // namespace capstan::config
